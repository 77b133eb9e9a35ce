"""Requests and their results: plain data that travels from the servicer to the engine and back.

Knows nothing of protobuf, tensors, blocks or clocks.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.heads import Task as HeadTask
from antiphon.controls.table import MAX_BEAM_WIDTH as MAX_BEAM_WIDTH
from antiphon.controls.table import MAX_NUM_LOGPROBS as MAX_NUM_LOGPROBS
from antiphon.controls.table import MAX_SEED as MAX_SEED
from antiphon.controls.table import EarlyStopping as EarlyStopping
from antiphon.controls.table import SamplingFields
from antiphon.domain.beam_steps import BeamStep
from antiphon.domain.combinations import Controls, check_combination
from antiphon.domain.ranges import FREE, check_free, check_ranges


class FinishReason(enum.Enum):
    """Reason for which an output ended."""

    STOP = "stop"  # the model produced its end token
    LENGTH = "length"  # max_new_tokens or the model's own limit was reached
    STOP_SEQUENCE = "stop_sequence"  # a stop id was sampled or a stop string completed
    TIME_LIMIT = "time_limit"  # time_limit_s passed; the tokens so far are returned
    EXHAUSTED = "exhausted"  # the constraints allowed no further token
    CANCELLED = "cancelled"  # the client cancelled the call
    DEADLINE = "deadline"  # the client's deadline passed
    ERROR = "error"  # the engine failed; the stream ends with INTERNAL


ANSWERED = frozenset(FinishReason) - {FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR}
"""Reasons that end an answer, complete or up to a limit of the request."""


class Priority(enum.Enum):
    """Order of service while requests wait."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class Task(enum.Enum):
    """Operation on a source."""

    GENERATE = "generate"
    SCORE = "score"  # compute log-probabilities of target_ids
    EMBED = "embed"  # pool the encoder output
    CLASSIFY = "classify"  # this and the following are heads of encoder-only models, under the same names
    TAG = "tag"
    FILL_MASK = "fill_mask"
    NEXT_SENTENCE = "next_sentence"


class Pooling(enum.Enum):
    """Reduction of the encoder output to one vector."""

    MEAN = "mean"
    MAX = "max"
    FIRST = "first"
    MODEL = "model"  # the model's own pooling head
    DECLARED = "declared"  # ModelConfig.embedding
    NONE = "none"  # the whole encoder output


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams(SamplingFields):
    """Sampling controls of one request, checked singly and in combination against the table.

    The fields are those of `antiphon.controls.table`. docs/CONTROLS.md gives the order of the steps.
    """

    def __post_init__(self) -> None:
        if _further(self) == _FURTHER_DEFAULTS:  # true of most requests, which need only few checks
            check_free(self)
            return
        check_ranges(self)
        check_combination(Controls(params=self))

    @property
    def is_narrowed(self) -> bool:
        """True when every step searches the vocabulary for the tokens to sample from."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.typical_p < 1)

    @property
    def is_greedy(self) -> bool:
        """True when every token is the likeliest one."""
        return self.temperature == 0.0

    @property
    def num_rows(self) -> int:
        """Rows of the batch that a request takes: one for each beam or sample."""
        return self.beam_width if self.beam_width > 1 else self.num_return_sequences


_FURTHER_FIELDS = tuple(one for one in fields(SamplingParams) if one.name not in FREE)
_further = attrgetter(*(one.name for one in _FURTHER_FIELDS))
_FURTHER_DEFAULTS = tuple(one.default for one in _FURTHER_FIELDS)
_NO_PARAMS = SamplingParams()


class StopMatcher(Protocol):
    """Search for stop strings in the tokens of one output."""

    def push(self, token_id: int) -> bool:
        """Read a token. Return True when the text so far completes a stop string."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """Identity, sender and time limit of a request of any task.

    request_id: unique among the requests of an engine.
    arrival_s, deadline_s: seconds on the engine's monotonic clock; deadline None is no deadline.
    client: name of the caller, as `caller.py` gives it. Clients with waiting requests take turns.
    priority: class of requests with which it waits.
    trace_id: id of the recorded trace that it belongs to; empty if there is none.
    """

    request_id: str
    arrival_s: float
    deadline_s: float | None = None
    client: str = ""
    priority: Priority = Priority.INTERACTIVE
    trace_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request(ABC):
    """Validated and tokenised request. Each kind of task has a separate class, see `tasks.py`.

    The engine reads every kind through this class. The properties of fields that a kind does not have are empty.

    source_ids: source tokens, end token included; empty for a decoder-only model.
    """

    arrival: Arrival
    source_ids: tuple[int, ...]

    @property
    @abstractmethod
    def task(self) -> Task:
        """Task of this request."""

    @property
    def request_id(self) -> str:
        """As in its arrival."""
        return self.arrival.request_id

    @property
    def arrival_s(self) -> float:
        """As in its arrival."""
        return self.arrival.arrival_s

    @property
    def deadline_s(self) -> float | None:
        """As in its arrival."""
        return self.arrival.deadline_s

    @property
    def client(self) -> str:
        """As in its arrival."""
        return self.arrival.client

    @property
    def priority(self) -> Priority:
        """As in its arrival."""
        return self.arrival.priority

    @property
    def trace_id(self) -> str:
        """As in its arrival."""
        return self.arrival.trace_id

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of a Generate."""
        return _NO_PARAMS

    @property
    def begin_id(self) -> int | None:
        """First decoder input of a Generate or Score; None is the model's begin token."""
        return None

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Target tokens after the begin token that a Generate or Score starts with."""
        return ()

    @property
    def num_prompt_ids(self) -> int:
        """Number of tokens of the prompt of a decoder-only model: the begin token and the first prefix_ids."""
        return 0

    @property
    def stop_matcher(self) -> Callable[[], StopMatcher] | None:
        """Constructor of the stop string matchers of a Generate; None if it has no stop strings."""
        return None

    @property
    def is_streamed(self) -> bool:
        """True when the client reads the tokens of a Generate while they are generated."""
        return False

    @property
    def reports_beam_steps(self) -> bool:
        """True when the answer of a Generate contains every step of its beam search."""
        return False

    @property
    def target_ids(self) -> tuple[int, ...]:
        """Tokens that a Score scores."""
        return ()

    @property
    def type_ids(self) -> tuple[int, ...]:
        """Token types of the source of an Embed or ReadHead; empty if all are 0."""
        return ()

    @property
    def pooling(self) -> Pooling:
        """Pooling of an Embed."""
        return Pooling.MEAN

    @property
    def normalize(self) -> bool:
        """True when the vector of an Embed is divided by its length."""
        return False

    @property
    def picks(self) -> tuple[int, ...]:
        """Source positions whose states a head reads."""
        return ()

    @property
    def num_fillings(self) -> int:
        """Number of tokens that a FILL_MASK proposes for each of its picks."""
        return 0

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives reported with each token's log-probability; None reports no log-probabilities."""
        return self.params.num_logprobs

    @property
    def has_target(self) -> bool:
        """True when the decoder runs: a target is generated or scored."""
        return self.task in (Task.GENERATE, Task.SCORE)

    @property
    def head(self) -> HeadTask | None:
        """Head that reads the source's states; None if no head does."""
        return head_of(self.task, self.pooling)

    @property
    def num_source_tokens(self) -> int:
        """Number of tokens of the source, or of the prompt of a decoder-only model."""
        return len(self.source_ids) or self.num_prompt_ids

    def decoder_input_ids(self, bos_id: int) -> tuple[int, ...]:
        """Return the decoder input before the first new token: begin token (bos_id by default) and prefix."""
        return (bos_id if self.begin_id is None else self.begin_id, *self.prefix_ids)


def head_of(task: Task, pooling: Pooling = Pooling.MEAN) -> HeadTask | None:
    """Return the head that a task needs; None if it needs none."""
    if task is Task.EMBED:
        return "pool" if pooling is Pooling.MODEL else None
    return _HEADS.get(task)


_HEADS: dict[Task, HeadTask] = {
    Task.CLASSIFY: "classify",
    Task.TAG: "tag",
    Task.FILL_MASK: "fill_mask",
    Task.NEXT_SENTENCE: "next_sentence",
}


@dataclass(frozen=True, slots=True)
class EncoderOutputs:
    """Result of an encoder's pooling or head.

    values: for EMBED [M], with Pooling.NONE [S, M]; for a head the scores [K, O] of its outputs for each pick; for
        FILL_MASK [K, k] the scores of token_ids [K, k], the likeliest tokens.
    """

    values: NDArray[np.float32]
    token_ids: NDArray[np.int64] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds from a request's arrival to its stages, on the engine's clock; None for a stage that it did not reach."""

    queued_s: float | None
    first_token_s: float | None
    total_s: float
    encoded_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability in the model's own distribution; alternatives best first."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvent:
    """New tokens of one output of a request, oldest first.

    Exactly one event of each output has a finish reason, and exactly one event of the request is its last. An error
    ends the request with one last event, even if outputs are unfinished.

    output_index: index of the output.
    token_ids: new target tokens, without end token and stop ids.
    logprobs: of token_ids, and then of the token that ended the output; empty if not requested.
    score: for a finished output: the score of a hypothesis, or the sum of the log-probabilities if requested.
    num_generated: in the last event: number of target tokens produced for all outputs, end tokens included.
    timing: in the last event.
    cache_blocks: in the last event: maximum number of cache blocks that the request held at one time.
    beam_steps: in the last event: steps of the beam search, if requested.
    encoder_outputs: result of a task without a target.
    """

    request_id: str
    output_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    score: float | None = None
    is_last: bool = False
    num_generated: int = 0
    timing: Timing | None = None
    cache_blocks: int = 0
    beam_steps: tuple[BeamStep, ...] = ()
    encoder_outputs: EncoderOutputs | None = field(default=None, compare=False)
    error: Exception | None = field(default=None, compare=False)
