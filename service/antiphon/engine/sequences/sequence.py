"""Generation state of a request and of its rows.

Plain data, changed by the engine's thread only. Values that change at every step (tokens, lengths) are in `batch/`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from antiphon.domain.request import BeamStep, CancelCause, Request, StopMatcher, Task, Timing
from antiphon.engine.constraints.logits_processors import LogitsProcessors
from antiphon.engine.sequences.stream import OutputStream, TokenSink

# A token sampled from a narrowed distribution costs 1 / NARROWING_COST more than another. Measured with the shipped
# model, whose short steps consist largely of sampling: a token takes 72 us of CPU with temperature alone, and 106 with
# all filters.
NARROWING_COST = 2


class SequenceState(enum.Enum):
    """Stage of a group; a label of metrics."""

    WAITING = "waiting"
    ENCODING = "encoding"  # holds its blocks; its source is being encoded
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """One row of the batch: an output being generated, or a beam of a search.

    index: index of the output, or of the beam.
    row: index in the runner's batch while running.
    self_block_table: its own blocks; the row of a beam may also read blocks of other beams.
    processors: the request's penalties and constraints; None if it has none.
    stop_matcher: finds stop strings in its tokens; None if the request has none.
    sink: receives its tokens. For a beam search the search itself streams tokens.
    logprob_sum: sum of the log-probabilities of its tokens, if the request asks for them.
    num_generated: number of target tokens produced; set when its row is freed (before that, the rows count them).
    produced: tokens that it had produced when it was preempted, which it feeds again; empty before.
    is_finished: its terminal event exists.
    """

    group: SequenceGroup
    index: int
    sink: TokenSink
    row: int | None = None
    self_block_table: tuple[int, ...] = ()
    processors: LogitsProcessors | None = None
    stop_matcher: StopMatcher | None = None
    logprob_sum: float = 0.0
    num_generated: int = 0
    produced: tuple[int, ...] = ()
    is_finished: bool = False

    @property
    def needs_token_checks(self) -> bool:
        """Return whether each of its tokens must be checked separately."""
        request = self.group.request
        return bool(
            self.processors is not None
            or self.stop_matcher is not None
            or request.params.stop_ids
            or request.num_logprobs is not None
        )

    def running_row(self) -> int:
        """Return its row; it must have one."""
        assert self.row is not None
        return self.row


@dataclass(kw_only=True, slots=True, eq=False)
class SequenceGroup:
    """Generation state of a request: all its rows, over one encoded source.

    max_new_tokens: maximum target tokens of an output, the end token included; the model has room for them.
    num_rows: number of its beams or samples; 0 if the source is only encoded.
    num_self_blocks: blocks of each row's prefix and longest target. num_cross_blocks: blocks of the source.
    num_first_blocks: number of num_self_blocks that a row receives when it joins; all of them unless it grows.
    grows: True if its row receives further blocks when it needs them.
    can_pause: True if its rows can be taken away and given back later, with the same tokens.
    lane: index of the lane that it was admitted to; None while it waits.
    sequences: its rows by index, while running; sequences of finished outputs stay, without a row.
    starting: sequences that receive their rows together with the source's blocks.
    pending: sequences that wait for a row, by index: not started, or preempted.
    blocks: all blocks that it holds. peak_blocks: maximum number of blocks that it has held at one time.
    source_len: tokens to encode, end token included; 0 for decoder-only models.
    ticket: its place in the order of admission; a preempted group keeps it.
    preempted_s: time of its preemption; None once it continues.
    cost: expected source and target tokens, by which waiting clients take turns; a token of a narrowed distribution
        counts more.
    num_generated: number of target tokens produced for its finished outputs.
    beam_steps: steps of its beam search, set at its end if its request asks for them.
    cancel_cause: reason of its cancellation; None where it was not cancelled.
    """

    request: Request
    stream: OutputStream
    max_new_tokens: int
    num_rows: int
    num_self_blocks: int
    num_cross_blocks: int
    num_first_blocks: int = 0
    grows: bool = False
    can_pause: bool = False
    state: SequenceState = SequenceState.WAITING
    lane: int | None = None
    sequences: tuple[Sequence, ...] = ()
    starting: tuple[Sequence, ...] = ()
    pending: list[Sequence] = field(default_factory=list)
    cross_block_table: tuple[int, ...] = ()
    blocks: set[int] = field(default_factory=set)
    peak_blocks: int = 0
    num_finished: int = 0
    ticket: int = 0
    admitted_s: float | None = None
    encoded_s: float | None = None
    first_token_s: float | None = None
    preempted_s: float | None = None
    num_generated: int = 0
    beam_steps: tuple[BeamStep, ...] = ()
    cancel_cause: CancelCause | None = None
    source_len: int = field(init=False)
    cost: int = field(init=False)

    def __post_init__(self) -> None:
        self.source_len = len(self.request.source_ids)
        given = self.request.num_source_tokens + len(self.request.target_ids)
        each = self.expected_target_len
        if self.request.params.is_narrowed:
            each += each // NARROWING_COST
        self.cost = given + self.num_rows * each
        self.num_first_blocks = self.num_first_blocks or self.num_self_blocks

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def is_beam_search(self) -> bool:
        """True when its rows are beams of one search."""
        return self.request.params.beam_width > 1 and self.request.task is Task.GENERATE

    @property
    def num_first_rows(self) -> int:
        """Number of rows that it needs before it can run: all beams of a search, or one sample."""
        return self.num_rows if self.is_beam_search else min(1, self.num_rows)

    @property
    def num_running_rows(self) -> int:
        """Number of rows that it holds now."""
        return sum(sequence.row is not None for sequence in self.sequences)

    @property
    def num_held_rows(self) -> int:
        """Number of rows that it holds now, or that are reserved for it while its source is encoded."""
        return len(self.starting) if self.state is SequenceState.ENCODING else self.num_running_rows

    @property
    def num_blocks(self) -> int:
        """Number of blocks that it needs before it can run."""
        return self.num_first_rows * self.num_first_blocks + self.num_cross_blocks

    @property
    def expected_target_len(self) -> int:
        """Expected number of generated tokens of each row: the length of the source, within the request's limits."""
        params = self.request.params
        if self.request.task is not Task.GENERATE:
            return 0
        # The length of a prompt does not predict the length of its continuation, and without an end token every target
        # has the maximum length.
        if not self.source_len or params.ignore_eos:
            return self.max_new_tokens
        return min(self.max_new_tokens, max(self.source_len, params.min_new_tokens))

    @property
    def max_blocks(self) -> int:
        """Maximum number of blocks that it can hold."""
        return self.num_rows * self.num_self_blocks + self.num_cross_blocks

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens to compute when it joins: source, one row's prefix or prompt, target to score, produced tokens."""
        first = next((sequence for sequence in self.sequences if not sequence.is_finished), None)
        num_produced = 0 if first is None else len(first.produced)
        return self.source_len + len(self.request.prefix_ids) + len(self.request.target_ids) + num_produced

    def hold(self, blocks: tuple[int, ...]) -> None:
        """Add blocks, which it did not hold, to those that it holds."""
        self.blocks.update(blocks)
        self.peak_blocks = max(self.peak_blocks, len(self.blocks))

    def take_first_rows(self, num_rows: int) -> None:
        """Divide the unfinished sequences into the first num_rows, which start now, and those that wait for rows."""
        unfinished = [sequence for sequence in self.sequences if not sequence.is_finished]
        self.starting = tuple(unfinished[:num_rows])
        self.pending = unfinished[num_rows:]

    @property
    def expires_s(self) -> float:
        """Time of its deadline or of its time limit, whichever is earlier; infinity without both."""
        request = self.request
        deadline_s = math.inf if request.deadline_s is None else request.deadline_s
        limit_s = request.params.time_limit_s
        return deadline_s if limit_s is None else min(deadline_s, request.arrival_s + limit_s)

    def timing(self, now_s: float) -> Timing:
        """Return the seconds from its arrival to each stage, and to its end, which is the present."""
        arrival_s = self.request.arrival_s
        return Timing(
            queued_s=None if self.admitted_s is None else self.admitted_s - arrival_s,
            encoded_s=None if self.encoded_s is None else self.encoded_s - arrival_s,
            first_token_s=None if self.first_token_s is None else self.first_token_s - arrival_s,
            total_s=now_s - arrival_s,
        )


def sequences_of(group: SequenceGroup, bos_id: int, eos_id: int) -> tuple[Sequence, ...]:
    """Return the sequences of an admitted group, which have not produced tokens yet."""
    request = group.request
    sequences = tuple(
        Sequence(group=group, index=index, sink=group.stream.output(index)) for index in range(group.num_rows)
    )
    if request.task is Task.GENERATE:
        for sequence in sequences:
            sequence.processors = LogitsProcessors.of(request.params, request.decoder_input_ids(bos_id), eos_id)
            sequence.stop_matcher = request.stop_matcher() if request.stop_matcher else None
    return sequences
