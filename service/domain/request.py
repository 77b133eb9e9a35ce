"""What is asked and how it ends: plain data that travels from the servicer to the engine and back.

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
    """Why an output ended."""

    STOP = "stop"  # the model produced its end token
    LENGTH = "length"  # max_new_tokens or the model's own limit was reached
    STOP_SEQUENCE = "stop_sequence"  # a stop id was chosen or a stop string completed
    TIME_LIMIT = "time_limit"  # time_limit_s passed; what there is is returned
    EXHAUSTED = "exhausted"  # the constraints left no token to choose
    CANCELLED = "cancelled"  # the client hung up
    DEADLINE = "deadline"  # the client's deadline passed
    ERROR = "error"  # the engine failed; the stream ends with INTERNAL


ANSWERED = frozenset(FinishReason) - {FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR}
"""Ends that are answers, whole or as far as was asked."""


class Priority(enum.Enum):
    """Who goes first while requests wait."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


class Task(enum.Enum):
    """What is to be done with a source."""

    GENERATE = "generate"
    SCORE = "score"  # judge target_ids
    EMBED = "embed"  # pool the encoder's states
    CLASSIFY = "classify"  # by heads of an encoder alone, named as there, from here on
    TAG = "tag"
    FILL_MASK = "fill_mask"
    NEXT_SENTENCE = "next_sentence"


class Pooling(enum.Enum):
    """How the encoder's states become one vector."""

    MEAN = "mean"
    MAX = "max"
    FIRST = "first"
    MODEL = "model"  # the model's own pooling head
    NONE = "none"  # all states, as they are


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams(SamplingFields):
    """Sampling controls of one request, each of them and all together checked against the table.

    The fields are those of `antiphon.controls.table`. docs/CONTROLS.md gives the order of the steps.
    """

    def __post_init__(self) -> None:
        if _further(self) == _FURTHER_DEFAULTS:  # as of most requests, which need not pay for every check
            check_free(self)
            return
        check_ranges(self)
        check_combination(Controls(params=self))

    @property
    def is_narrowed(self) -> bool:
        """True when every step searches the vocabulary for the part of it that a token is drawn from."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.typical_p < 1)

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature == 0.0

    @property
    def num_rows(self) -> int:
        """Rows of the batch that a request takes: its beams, or its samples."""
        return self.beam_width if self.beam_width > 1 else self.num_return_sequences


_FURTHER_FIELDS = tuple(one for one in fields(SamplingParams) if one.name not in FREE)
_further = attrgetter(*(one.name for one in _FURTHER_FIELDS))
_FURTHER_DEFAULTS = tuple(one.default for one in _FURTHER_FIELDS)


class StopMatcher(Protocol):
    """Reads one output's tokens and says when a stop string has come."""

    def push(self, token_id: int) -> bool:
        """Take the next token; True when the text so far completes a stop string."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One immutable ask, already validated and tokenised.

    source_ids: source tokens, end token included; empty for a decoder alone.
    begin_id: first decoder input; None is the model's begin token.
    prefix_ids: first target tokens, given and not generated; without the begin token.
    num_prompt_ids: of a decoder alone, how many of the begin token and prefix_ids are the prompt; otherwise 0.
    arrival_s, deadline_s: seconds on the engine's monotonic clock; deadline None is no deadline.
    stop_matcher: makes what reads one output for stop strings; None where there are none.
    is_streamed: somebody reads tokens as they come; a beam search otherwise tells its outputs at the end only.
    target_ids: of a SCORE, the tokens to judge, end token included. pooling, normalize: of an EMBED.
    type_ids: token types of the source; empty where all are 0.
    picks: source positions whose states a head reads. num_fillings: of a FILL_MASK, tokens to propose for each.
    trace_id: of the recorded trace that it belongs to; empty where there is none.
    client: who asks, as `caller.py` names it: those who wait share by it. priority: who goes first.
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
        """Whether a target is generated or judged; otherwise the source's states are read, and that is all."""
        return self.task in (Task.GENERATE, Task.SCORE)

    @property
    def head(self) -> HeadTask | None:
        """The head that reads its source's states; None where none does."""
        return head_of(self.task, self.pooling)

    @property
    def num_source_tokens(self) -> int:
        """Tokens of the source, or of the prompt that takes its place."""
        return len(self.source_ids) or self.num_prompt_ids

    def given_ids(self, bos_id: int) -> tuple[int, ...]:
        """What precedes the first produced token: the begin token, bos_id where none is named, and the prefix."""
        return (bos_id if self.begin_id is None else self.begin_id, *self.prefix_ids)

    @property
    def num_logprobs(self) -> int | None:
        """As params say; what a SCORE asks for without a number is its target's alone."""
        asked = self.params.num_logprobs
        return 0 if asked is None and self.task is Task.SCORE else asked


def head_of(task: Task, pooling: Pooling = Pooling.MEAN) -> HeadTask | None:
    """The head that a task needs; None where it needs none."""
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
    """What an encoder's states came to.

    values: of an EMBED [M], with Pooling.NONE [S, M]; of a head, scores [K, O] of its outputs for each pick; of a
    FILL_MASK [K, k], those of token_ids [K, k], the likeliest tokens.
    """

    values: NDArray[np.float32]
    token_ids: NDArray[np.int64] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds a request spent, measured by the engine's clock; None where it never got that far."""

    queued_s: float | None
    first_token_s: float | None
    total_s: float
    encoded_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability, of the model's own distribution; alternatives best first."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenEvent:
    """New tokens of one output of a request, oldest first.

    Exactly one event of each output has a finish reason, and exactly one of the request is its last, unless an error
    ends it: that event is the last, whatever outputs were left.

    output_index: which output.
    token_ids: new target tokens; end token and stop ids are never among them.
    logprobs: of token_ids, and of the token that ended the output last; empty where not asked.
    score: of a finished output: a hypothesis's score, or the sum of its log-probabilities where asked.
    num_generated: of the last event: target tokens produced for all outputs, end tokens included.
    timing: of the last event.
    readout: of a task that wants no target.
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
