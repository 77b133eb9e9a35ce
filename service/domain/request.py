"""Requests and their results: plain data that travels from the servicer to the engine and back.

Knows nothing of protobuf, tensors, blocks or clocks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from antiphon.controls.table import MAX_BEAM_WIDTH as MAX_BEAM_WIDTH
from antiphon.controls.table import MAX_NUM_LOGPROBS as MAX_NUM_LOGPROBS
from antiphon.controls.table import MAX_SEED as MAX_SEED
from antiphon.controls.table import EarlyStopping as EarlyStopping
from antiphon.controls.table import SamplingFields
from antiphon.model.head_config import Task as HeadTask
from antiphon.service.domain.combinations import Controls, check_combination
from antiphon.service.domain.ranges import FREE, check_free, check_ranges


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
    NONE = "none"  # the whole encoder output


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams(SamplingFields):
    """Sampling controls of one request, each of them and all together checked against the table.

    The fields are those of `antiphon.controls.table`. docs/CONTROLS.md gives the order of the steps.
    """

    def __post_init__(self) -> None:
        if _further(self) == _FURTHER_DEFAULTS:  # as for most requests, which need only few checks
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


class StopMatcher(Protocol):
    """Finds stop strings in the tokens of one output."""

    def push(self, token_id: int) -> bool:
        """Read a token; returns True when the text so far completes a stop string."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One immutable request, already validated and tokenised.

    source_ids: source tokens, end token included; empty for decoder-only models.
    begin_id: first decoder input; None is the model's begin token.
    prefix_ids: first target tokens, given and not generated; without the begin token.
    num_prompt_ids: decoder-only: number of tokens among the begin token and prefix_ids that are the prompt; otherwise
        0.
    arrival_s, deadline_s: seconds on the engine's monotonic clock; deadline None is no deadline.
    stop_matcher: makes a matcher for one output; None where there are no stop strings.
    is_streamed: the client reads tokens as they come. A beam search that is not streamed sends outputs at its end only.
    target_ids: tokens to score, end token included, for SCORE. pooling, normalize: for EMBED.
    type_ids: token types of the source; empty where all are 0.
    picks: source positions whose encoder output a head reads. num_fillings: tokens to propose for each, for FILL_MASK.
    trace_id: id of its recorded trace; empty where there is none.
    client: name of the caller from `caller.py`; waiting clients take turns. priority: order of service.
    """

    request_id: str
    source_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    deadline_s: float | None = None
    begin_id: int | None = None
    prefix_ids: tuple[int, ...] = ()
    num_prompt_ids: int = 0
    stop_matcher: Callable[[], StopMatcher] | None = None
    is_streamed: bool = True
    task: Task = Task.GENERATE
    target_ids: tuple[int, ...] = ()
    pooling: Pooling = Pooling.MEAN
    normalize: bool = False
    type_ids: tuple[int, ...] = ()
    picks: tuple[int, ...] = ()
    num_fillings: int = 0
    client: str = ""
    trace_id: str = ""
    priority: Priority = Priority.INTERACTIVE

    @property
    def has_target(self) -> bool:
        """True when a target is generated or scored; otherwise only the encoder output is read."""
        return self.task in (Task.GENERATE, Task.SCORE)

    @property
    def head(self) -> HeadTask | None:
        """Head that reads the encoder output of its source; None where none does."""
        return head_of(self.task, self.pooling)

    @property
    def num_source_tokens(self) -> int:
        """Tokens of the source, or of the prompt for decoder-only models."""
        return len(self.source_ids) or self.num_prompt_ids

    def given_ids(self, bos_id: int) -> tuple[int, ...]:
        """Return the tokens before the first produced one: begin_id, or bos_id where it is None, and the prefix."""
        return (bos_id if self.begin_id is None else self.begin_id, *self.prefix_ids)

    @property
    def num_logprobs(self) -> int | None:
        """Log-probabilities to return, as in the parameters; a SCORE without a number returns those of its target."""
        asked = self.params.num_logprobs
        return 0 if asked is None and self.task is Task.SCORE else asked


def head_of(task: Task, pooling: Pooling = Pooling.MEAN) -> HeadTask | None:
    """Return the head that a task needs; None where it needs none."""
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
class Readout:
    """Result of an encoder's pooling or head.

    values: for EMBED [M], with Pooling.NONE [S, M]; for a head the scores [K, O] of its outputs for each pick; for
        FILL_MASK [K, k] the scores of token_ids [K, k], the likeliest tokens.
    """

    values: NDArray[np.float32]
    token_ids: NDArray[np.int64] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds from a request's arrival to its stages, on the engine's clock; None where it did not reach a stage."""

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
    ends the request with one last event, also where outputs are unfinished.

    output_index: index of the output.
    token_ids: new target tokens, without end token and stop ids.
    logprobs: of token_ids, and then of the token that ended the output; empty where not asked for.
    score: of a finished output: a hypothesis's score, or the sum of its log-probabilities where asked for.
    num_generated: of the last event: target tokens produced for all outputs, end tokens included.
    timing: of the last event.
    readout: result of a task without a target.
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
    readout: Readout | None = field(default=None, compare=False)
    error: Exception | None = field(default=None, compare=False)
