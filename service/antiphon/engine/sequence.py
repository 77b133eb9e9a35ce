"""Generation state of a request and of its rows: plain data, changed by the engine's threads only.

Values that change at every step (tokens, lengths) are in `batch`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from antiphon.domain.request import BeamStep, CancelCause, Priority, Request, StopMatcher, Task, Timing
from antiphon.engine.logits_processors import LogitsProcessors
from antiphon.engine.stream import RequestStream, TokenSink

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
    """One row of the batch: an output being generated, or a beam of a search."""

    group: SequenceGroup
    index: int
    """Index of the output, or of the beam."""
    sink: TokenSink
    """Receives its tokens, if they are streamed. For a beam search the search itself streams tokens."""
    row: int | None = None
    """Index in the runner's batch while running."""
    self_block_table: tuple[int, ...] = ()
    """Its own blocks; the row of a beam may also read blocks of other beams."""
    processors: LogitsProcessors | None = None
    """The request's penalties and constraints; None if it has none."""
    stop_matcher: StopMatcher | None = None
    """Finds stop strings in its tokens; None if the request has none."""
    logprob_sum: float = 0.0
    """Sum of the log-probabilities of its tokens, if the request asks for them."""
    num_generated: int = 0
    """Target tokens produced; set when its row is freed (before that, the rows count them)."""
    produced: tuple[int, ...] = ()
    """Tokens that it had produced when it was preempted, which it feeds again; empty before."""
    is_finished: bool = False
    """Its terminal event exists."""

    @property
    def is_whole(self) -> bool:
        """Return whether its tokens are sent with its terminal event, not one by one: fewer wake-ups of the reader."""
        request = self.group.request
        return request.task is Task.GENERATE and not request.is_streamed and request.num_logprobs is None

    @property
    def needs_token_checks(self) -> bool:
        """Return whether each of its tokens must be checked separately."""
        request = self.group.request
        return bool(
            (self.processors is not None and not self.processors.is_constant)
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
    """Generation state of a request: all its rows, over one encoded source."""

    request: Request
    stream: RequestStream
    """Receives its events."""
    max_new_tokens: int
    """Maximum target tokens of an output, the end token included; the model has room for them."""
    num_rows: int
    """Number of its beams or samples; 0 if the source is only encoded."""
    num_self_blocks: int
    """Blocks of each row's prefix and longest target."""
    num_cross_blocks: int
    """Blocks of the source."""
    num_first_blocks: int = 0
    """Number of num_self_blocks that a row receives when it joins; all of them unless it grows."""
    grows: bool = False
    """Its row receives further blocks when it needs them."""
    can_pause: bool = False
    """Its rows can be taken away and given back later, with the same tokens."""
    state: SequenceState = SequenceState.WAITING
    lane: int | None = None
    """Index of the lane that it was admitted to; None while it waits."""
    ticket: int = 0
    """Its place in the order of admission; a preempted group keeps it."""
    source_len: int = field(init=False)
    """Tokens to encode, end token included; 0 for decoder-only models."""
    cost: int = field(init=False)
    """Expected source and target tokens, by which waiting clients take turns; a token of a narrowed distribution counts
    more."""

    sequences: tuple[Sequence, ...] = ()
    """Its rows by index, while running; sequences of finished outputs stay, without a row."""
    starting: tuple[Sequence, ...] = ()
    """Sequences that receive their rows together with the source's blocks."""
    pending: list[Sequence] = field(default_factory=list)
    """Sequences that wait for a row, by index: not started, or preempted."""
    cross_block_table: tuple[int, ...] = ()
    """Blocks of the source, in the order of its tokens."""
    blocks: set[int] = field(default_factory=set)
    """All blocks that it holds."""
    peak_blocks: int = 0
    """Maximum number of blocks that it has held at one time."""

    admitted_s: float | None = None
    """Time at which it first left the queue."""
    encoded_s: float | None = None
    """Time at which its source was first encoded."""
    first_token_s: float | None = None
    """Time of the first token of any output."""
    preempted_s: float | None = None
    """Time of its preemption; None once it continues."""

    num_finished: int = 0
    """Outputs that have ended."""
    num_generated: int = 0
    """Target tokens produced for its finished outputs."""
    beam_steps: tuple[BeamStep, ...] = ()
    """Steps of its beam search, set at its end if its request asks for them."""
    cancel_cause: CancelCause | None = None
    """Reason of its cancellation; None where it was not cancelled."""

    def __post_init__(self) -> None:
        self.source_len = len(self.request.source_ids)
        num_known = self.request.num_source_tokens + len(self.request.target_ids)
        row_cost = self.expected_target_len
        if self.request.params.is_narrowed:
            row_cost += row_cost // NARROWING_COST
        self.cost = num_known + self.num_rows * row_cost
        self.num_first_blocks = self.num_first_blocks or self.num_self_blocks

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def age(self) -> tuple[bool, int]:
        """Sort key of admitted groups: interactive before batch, then the oldest first."""
        return self.request.priority is Priority.BATCH, self.ticket

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
            sequence.processors = LogitsProcessors.of(
                request.params, request.decoder_input_ids(bos_id), eos_id, request.candidate_ids
            )
            sequence.stop_matcher = request.stop_matcher() if request.stop_matcher else None
    return sequences
