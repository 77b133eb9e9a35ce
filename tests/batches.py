"""Builders of choices and decoder batches from lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from antiphon.model.ops.choices import Choices
from antiphon.service.domain.request import SamplingParams
from antiphon.service.runtime.runner import DecodeBatch

Tables = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One choice of a Choices, under the names there; edits are (token id, bias, penalty, shift)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    given_id: int = -1
    num_logprobs: int = -1
    is_normalized: bool = False
    is_exclusive: bool = False
    edits: Sequence[tuple[int, float, float, float]] = ()


def choice_of(params: SamplingParams, *, num_logprobs: int = -1) -> Choice:
    """Return one choice with a request's settings and without edits."""
    return Choice(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        typical_p=params.typical_p,
        seed=params.seed,
        num_logprobs=num_logprobs,
    )


def choices_of(picks: Sequence[int], settings: Sequence[Choice] | None = None) -> Choices:
    """Return choices after the tokens `picks`; by default greedy, without log-probabilities or edits."""
    held = settings if settings is not None else [Choice()] * len(picks)
    assert len(held) == len(picks)
    edits = [edit for choice in held for edit in choice.edits]
    return Choices(
        picks=np.array(picks, np.int32),
        temperatures=np.array([choice.temperature for choice in held], np.float32),
        top_ks=np.array([choice.top_k for choice in held], np.int32),
        top_ps=np.array([choice.top_p for choice in held], np.float32),
        min_ps=np.array([choice.min_p for choice in held], np.float32),
        typical_ps=np.array([choice.typical_p for choice in held], np.float32),
        seeds=np.array([choice.seed for choice in held], np.uint64),
        given_ids=np.array([choice.given_id for choice in held], np.int64),
        num_logprobs=np.array([choice.num_logprobs for choice in held], np.int32),
        is_normalized=np.array([choice.is_normalized for choice in held], np.int32),
        is_exclusive=np.array([choice.is_exclusive for choice in held], np.int32),
        edit_offsets=np.cumsum([0, *(len(choice.edits) for choice in held)], dtype=np.int32),
        edit_ids=np.array([edit[0] for edit in edits], np.int32),
        edit_values=np.array([edit[1:] for edit in edits], np.float32).reshape(-1, 3),
    )


def batch_of(
    fed: Sequence[Sequence[int]],
    past_lens: Sequence[int],
    source_lens: Sequence[int],
    *,
    tables: tuple[Tables, Tables] | None = None,
    params: Sequence[SamplingParams] | None = None,
    num_logprobs: int = -1,
    choices: Choices | None = None,
) -> DecodeBatch:
    """Return a batch in which each row feeds tokens fed[row] after past_lens[row] earlier ones.

    tables: self and cross blocks of each row, all of one length; None if the runner does not use them.
    choices: None gives one after each row's last token, with num_logprobs, and greedy unless params is set.
    """
    rows = range(len(fed))
    offsets = np.cumsum([0, *map(len, fed)], dtype=np.int32)
    if choices is None:
        held = params or [SamplingParams()] * len(fed)
        settings = [choice_of(row, num_logprobs=num_logprobs) for row in held]
        choices = choices_of([int(end) - 1 for end in offsets[1:]], settings)
    self_tables, cross_tables = tables or ([[]] * len(fed), [[]] * len(fed))
    return DecodeBatch(
        token_ids=np.array([token for row in rows for token in fed[row]], np.int64),
        positions=np.array([past_lens[row] + index for row in rows for index in range(len(fed[row]))], np.int32),
        offsets=offsets,
        self_tables=np.array(self_tables, np.int32, ndmin=2),
        cross_tables=np.array(cross_tables, np.int32, ndmin=2),
        source_lens=np.array(source_lens, np.int32),
        choices=choices,
        max_num_logprobs=max(0, int(choices.num_logprobs.max(initial=0))),
    )
