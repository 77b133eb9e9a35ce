"""Requests by kind of task: Generate, Score, Embed and ReadHead, each with only the fields of its task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from antiphon.domain.errors import InvalidArgument
from antiphon.domain.request import (
    MAX_NUM_LOGPROBS,
    Pooling,
    Request,
    SamplingParams,
    StopMatcher,
    Task,
    head_of,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class WithTarget(Request):
    """Request that runs the decoder.

    begin_id: first decoder input; None is the model's begin token.
    prefix_ids: first target tokens, given and not generated; without the begin token.
    num_prompt_ids: for a decoder-only model, number of prompt tokens: the begin token and the first prefix_ids.
        Otherwise 0.
    """

    begin_id: int | None = None
    prefix_ids: tuple[int, ...] = ()
    num_prompt_ids: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Generate(WithTarget):
    """Request to generate targets.

    stop_matcher: makes the stop string matcher of one output; None if there are no stop strings.
    is_streamed: the client reads tokens while they are generated. Otherwise a beam search reports only its end.
    reports_beam_steps: the answer contains every step of the beam search; only with a beam_width above 1.
    """

    task: Task = field(default=Task.GENERATE, init=False, repr=False)
    params: SamplingParams = field()
    stop_matcher: Callable[[], StopMatcher] | None = None
    is_streamed: bool = True
    reports_beam_steps: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Score(WithTarget):
    """Request for the log-probability of every token of a given target.

    target_ids: tokens to score, end token included.
    num_alternatives: number of likeliest tokens to report with each of them.
    """

    task: Task = field(default=Task.SCORE, init=False, repr=False)
    target_ids: tuple[int, ...] = field()
    num_alternatives: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_alternatives <= MAX_NUM_LOGPROBS:
            raise InvalidArgument("num_alternatives", self.num_alternatives, f"between 0 and {MAX_NUM_LOGPROBS}")

    @property
    def num_logprobs(self) -> int:
        """Number of alternatives: a Score always reports log-probabilities."""
        return self.num_alternatives


@dataclass(frozen=True, kw_only=True, slots=True)
class Embed(Request):
    """Request for the encoder's states of a source, pooled or unpooled.

    type_ids: token types of the source; empty if all are 0.
    pooling: conversion of the states to one vector. normalize: divide the vector by its length.
    """

    task: Task = field(default=Task.EMBED, init=False, repr=False)
    type_ids: tuple[int, ...] = ()
    pooling: Pooling = Pooling.MEAN
    normalize: bool = False

    @property
    def picks(self) -> tuple[int, ...]:
        """First position for the model's own pooling head; empty for other poolings."""
        return (0,) if self.pooling is Pooling.MODEL else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadHead(Request):
    """Request for the outputs of a head of an encoder-only model.

    task: CLASSIFY, TAG, FILL_MASK or NEXT_SENTENCE.
    type_ids: token types of the source; empty if all are 0.
    picks: source positions whose states the head reads.
    num_fillings: for FILL_MASK, number of tokens to propose for each position.
    """

    task: Task = field()
    type_ids: tuple[int, ...] = ()
    picks: tuple[int, ...] = field()
    num_fillings: int = 0

    def __post_init__(self) -> None:
        if head_of(self.task) is None:
            raise ValueError(f"task is {self.task}; it must be CLASSIFY, TAG, FILL_MASK or NEXT_SENTENCE")
