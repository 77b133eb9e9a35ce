"""Requests and their results: plain data that travels from the servicer to the engine and back.

Only cancellations travel backwards.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.heads import Task as HeadTask
from antiphon.controls.table import MAX_NUM_LOGPROBS
from antiphon.domain.errors import InvalidArgument
from antiphon.domain.sampling_params import SamplingParams

_NO_PARAMS = SamplingParams()


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


TARGET_TASKS = (Task.GENERATE, Task.SCORE)
"""Tasks for which the decoder runs."""


class Pooling(enum.Enum):
    """Reduction of the encoder output to one vector."""

    MEAN = "mean"
    MAX = "max"
    FIRST = "first"
    MODEL = "model"  # the model's own pooling head
    DECLARED = "declared"  # ModelConfig.embedding
    NONE = "none"  # the whole encoder output


class StopMatcher(Protocol):
    """Search for stop strings in the tokens of one output."""

    def push(self, token_id: int) -> bool:
        """Read a token. Return True when the text so far completes a stop string."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """Identity, sender and time limit of a request of any task."""

    request_id: str
    """Unique among the requests of an engine."""
    arrival_s: float
    """Seconds on the engine's monotonic clock."""
    deadline_s: float | None = None
    """On the same clock; None is no deadline."""
    client: str = ""
    """Name of the caller. Clients with waiting requests take turns."""
    priority: Priority = Priority.INTERACTIVE
    """Class of requests with which it waits."""
    trace_id: str = ""
    """Id of the recorded trace that it belongs to; empty if there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Validated and tokenised request of any task. The fields of other tasks keep their defaults."""

    arrival: Arrival
    task: Task = Task.GENERATE
    source_ids: tuple[int, ...]
    """Source tokens, end token included; empty for a decoder-only model."""
    type_ids: tuple[int, ...] = ()
    """Token types of the source; empty if all are 0."""

    # GENERATE and SCORE, which run the decoder
    begin_id: int | None = None
    """First decoder input; None is the model's begin token."""
    prefix_ids: tuple[int, ...] = ()
    """First target tokens, given and not generated; without the begin token."""
    num_prompt_ids: int = 0
    """For a decoder-only model, number of prompt tokens: the begin token and the first prefix_ids. Otherwise 0."""

    # GENERATE
    params: SamplingParams = _NO_PARAMS
    candidate_ids: NDArray[np.int32] | None = field(default=None, compare=False)
    """[C], rising: the only tokens of the model's distribution; None is the whole vocabulary. Not to be changed."""
    stop_matcher: Callable[[], StopMatcher] | None = None
    """Makes the stop string matcher of one output; None if there are no stop strings."""
    is_streamed: bool = False
    """The client reads tokens while they are generated. Otherwise the end of an output reports its tokens, unless they
    have log-probabilities."""
    reports_beam_steps: bool = False
    """The answer contains every step of the beam search; only with a beam_width above 1."""

    # SCORE
    target_ids: tuple[int, ...] = ()
    """Tokens to score, end token included."""
    num_alternatives: int = 0
    """Number of likeliest tokens to report with each token of the target."""

    # EMBED
    pooling: Pooling = Pooling.MEAN
    """Conversion of the encoder's states to one vector."""
    normalize: bool = False
    """Divide the vector by its length."""

    # CLASSIFY, TAG, FILL_MASK and NEXT_SENTENCE, which read the outputs of a head
    picks: tuple[int, ...] = ()
    """Source positions whose states the head reads."""
    num_fillings: int = 0
    """For FILL_MASK, number of tokens to propose for each position."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_alternatives <= MAX_NUM_LOGPROBS:
            raise InvalidArgument("num_alternatives", self.num_alternatives, f"between 0 and {MAX_NUM_LOGPROBS}")

    @property
    def request_id(self) -> str:
        """As in the arrival."""
        return self.arrival.request_id

    @property
    def arrival_s(self) -> float:
        """As in the arrival."""
        return self.arrival.arrival_s

    @property
    def deadline_s(self) -> float | None:
        """As in the arrival."""
        return self.arrival.deadline_s

    @property
    def client(self) -> str:
        """As in the arrival."""
        return self.arrival.client

    @property
    def priority(self) -> Priority:
        """As in the arrival."""
        return self.arrival.priority

    @property
    def trace_id(self) -> str:
        """As in the arrival."""
        return self.arrival.trace_id

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives reported with each token's log-probability; None reports no log-probabilities."""
        return self.num_alternatives if self.task is Task.SCORE else self.params.num_logprobs

    @property
    def has_target(self) -> bool:
        """True when the decoder runs: a target is generated or scored."""
        return self.task in TARGET_TASKS

    @property
    def head(self) -> HeadTask | None:
        """Head that reads the source's states; None if no head does."""
        return head_of(self.task, self.pooling)

    @property
    def head_positions(self) -> tuple[int, ...]:
        """Source positions whose states the head reads; the model's own pooling head reads the first one."""
        return (0,) if self.head == "pool" else self.picks

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


class CancelCause(enum.Enum):
    """Cause of the cancellation of a request before its answer was read; a label of metrics."""

    CLIENT = "client"  # the client cancelled the call, or its connection was lost
    SLOW_READER = "slow_reader"  # the client reads no message for longer than the server waits
    DEADLINE = "deadline"  # gRPC saw the deadline pass before the engine did; counted as a deadline miss
    LOST_LOOP = "lost_loop"  # the event loop of the reader is closed
    FAULT = "fault"  # the server failed to send the answer


class Cancellations:
    """Cancellations since the engine last read them; thread-safe."""

    def __init__(self) -> None:
        self._asked: deque[tuple[str, CancelCause]] = deque()

    def __bool__(self) -> bool:
        return bool(self._asked)

    def put(self, request_id: str, cause: CancelCause) -> None:
        """Add a request to be ended; the engine ignores unknown and finished ones."""
        self._asked.append((request_id, cause))

    def take(self) -> list[tuple[str, CancelCause]]:
        """Remove and return all cancellations, oldest first."""
        # popleft, not a swap: another thread may call put meanwhile.
        return [self._asked.popleft() for _ in range(len(self._asked))]


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


@dataclass(frozen=True, slots=True)
class Beam:
    """A beam after one step of a search."""

    parent: int
    """Index of the beam that it continues, among the live beams of the step before; 0 at the first step."""
    token_id: int
    """Its new token."""
    total_logprob: float
    """Sum of the log-probabilities of its tokens, after penalties."""
    score: float | None = None
    """Of a finished hypothesis: total_logprob divided by its length to the power of the length penalty."""


@dataclass(frozen=True, slots=True)
class BeamStep:
    """One step of a search. live: best first. finished: in the order in which the search found them."""

    live: tuple[Beam, ...]
    finished: tuple[Beam, ...]


@dataclass(frozen=True, slots=True)
class EncoderOutputs:
    """Result of an encoder's pooling or head."""

    values: NDArray[np.float32]
    """For EMBED [M], with Pooling.NONE [S, M]; for a head the scores [K, O] of its outputs for each pick; for FILL_MASK
    [K, k] the scores of token_ids."""
    token_ids: NDArray[np.int64] | None = None
    """For FILL_MASK [K, k] the likeliest tokens."""


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


@dataclass(kw_only=True, slots=True)
class TokenEvent:
    """New tokens of one output of a request, oldest first.

    Engine and stream change it until it is read: frozen events, and copies of them, cost more.

    Exactly one event of each output has a finish reason, and exactly one event of the request is its last. An error
    ends the request with one last event, even if outputs are unfinished. That of a request which the engine of another
    process has refused has no finish reason.
    """

    request_id: str
    output_index: int = 0
    token_ids: tuple[int, ...] = ()
    """New target tokens, without end token and stop ids."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of token_ids, and then of the token that ended the output; empty if not requested."""
    finish_reason: FinishReason | None = None
    score: float | None = None
    """For a finished output: the score of a hypothesis, or the sum of the log-probabilities if requested."""
    is_last: bool = False
    num_generated: int = 0
    """In the last event: number of target tokens produced for all outputs, end tokens included."""
    timing: Timing | None = None
    """In the last event."""
    cache_blocks: int = 0
    """In the last event: maximum number of cache blocks that the request held at one time."""
    beam_steps: tuple[BeamStep, ...] = ()
    """In the last event: steps of the beam search, if requested."""
    encoder_outputs: EncoderOutputs | None = field(default=None, compare=False)
    """Result of a task without a target."""
    error: Exception | None = field(default=None, compare=False)
