"""Builders of sampling parameters and decoder batches from lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.domain.sampling_params import SamplingParams
from antiphon.ops.sampling import FLOAT_PARAMS, INT_PARAMS, SamplingArrays
from antiphon.runtime.runner import DecodeBatch

Tables = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSettings:
    """Parameters of one sample, under the names in SamplingArrays; edits are (token id, bias, penalty, shift)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    seed: int = 0
    forced_id: int = -1
    num_logprobs: int = -1
    is_normalized: bool = False
    restriction: int = 0
    edits: Sequence[tuple[int, float, float, float]] = ()


def settings_of_params(params: SamplingParams, *, num_logprobs: int = -1) -> SampleSettings:
    """Return a sample's parameters from those of a request, without edits."""
    columns = {name: getattr(params, name) for name in FLOAT_PARAMS}
    return SampleSettings(top_k=params.top_k, seed=params.seed, num_logprobs=num_logprobs, **columns)


def sampling_of(picks: Sequence[int], settings: Sequence[SampleSettings] | None = None) -> SamplingArrays:
    """Return parameters of samples after the tokens `picks`; by default greedy, without log-probabilities or edits."""
    held = settings if settings is not None else [SampleSettings()] * len(picks)
    assert len(held) == len(picks)
    edits = [edit for one in held for edit in one.edits]
    return SamplingArrays(
        picks=np.array(picks, np.int32),
        float_params=_columns([[getattr(one, name) for name in FLOAT_PARAMS] for one in held], np.float32),
        int_params=_columns([[_signed(getattr(one, name)) for name in INT_PARAMS] for one in held], np.int64),
        edit_offsets=np.cumsum([0, *(len(one.edits) for one in held)], dtype=np.int32),
        edit_ids=np.array([edit[0] for edit in edits], np.int32),
        edit_values=np.array([edit[1:] for edit in edits], np.float32).reshape(-1, 3),
    )


def _columns(rows: list[list[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    width = len(FLOAT_PARAMS if dtype is np.float32 else INT_PARAMS)
    return np.array(rows, dtype).reshape(len(rows), width)


def _signed(value: int) -> int:
    """Return the int64 that has the bits of a uint64; any int64 as it is."""
    return value - 2**64 if value >= 2**63 else value


def batch_of(
    fed: Sequence[Sequence[int]],
    past_lens: Sequence[int],
    source_lens: Sequence[int],
    *,
    tables: tuple[Tables, Tables] | None = None,
    params: Sequence[SamplingParams] | None = None,
    num_logprobs: int = -1,
    sampling: SamplingArrays | None = None,
) -> DecodeBatch:
    """Return a batch in which each row feeds tokens fed[row] after past_lens[row] earlier ones.

    tables: self and cross blocks of each row, all of one length; None where the runner has no use for them.
    sampling: one after each row's last token where None: greedy unless params say otherwise, with num_logprobs.
    """
    rows = range(len(fed))
    offsets = np.cumsum([0, *map(len, fed)], dtype=np.int32)
    if sampling is None:
        held = params or [SamplingParams()] * len(fed)
        settings = [settings_of_params(row, num_logprobs=num_logprobs) for row in held]
        sampling = sampling_of([int(end) - 1 for end in offsets[1:]], settings)
    self_tables, cross_tables = tables or ([[]] * len(fed), [[]] * len(fed))
    return DecodeBatch(
        token_ids=np.array([token for row in rows for token in fed[row]], np.int64),
        positions=np.array([past_lens[row] + index for row in rows for index in range(len(fed[row]))], np.int32),
        offsets=offsets,
        self_tables=np.array(self_tables, np.int32, ndmin=2),
        cross_tables=np.array(cross_tables, np.int32, ndmin=2),
        source_lens=np.array(source_lens, np.int32),
        sampling=sampling,
        max_num_logprobs=max(0, int(sampling.ints("num_logprobs").max(initial=0))),
    )
