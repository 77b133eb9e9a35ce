"""Decoder batches built from lists, as tests write them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from antiphon.service.request import SamplingParams
from antiphon.service.runner import DecodeBatch

Tables = Sequence[Sequence[int]]


def batch_of(
    fed: Sequence[Sequence[int]],
    past_lens: Sequence[int],
    source_lens: Sequence[int],
    *,
    tables: tuple[Tables, Tables] | None = None,
    params: Sequence[SamplingParams] | None = None,
    num_logprobs: int = -1,
) -> DecodeBatch:
    """Rows that feed tokens fed[row] after past_lens[row] earlier ones; greedy unless params say otherwise.

    tables: self and cross blocks of each row, all of one length; None where the runner has no use for them.
    """
    rows = range(len(fed))
    settings = params or [SamplingParams()] * len(fed)
    self_tables, cross_tables = tables or ([[]] * len(fed), [[]] * len(fed))
    return DecodeBatch(
        token_ids=np.array([token for row in rows for token in fed[row]], np.int64),
        positions=np.array([past_lens[row] + index for row in rows for index in range(len(fed[row]))], np.int32),
        offsets=np.cumsum([0, *map(len, fed)], dtype=np.int32),
        self_tables=np.array(self_tables, np.int32, ndmin=2),
        cross_tables=np.array(cross_tables, np.int32, ndmin=2),
        source_lens=np.array(source_lens, np.int32),
        temperatures=np.array([row.temperature for row in settings], np.float32),
        top_ks=np.array([row.top_k for row in settings], np.int32),
        top_ps=np.array([row.top_p for row in settings], np.float32),
        seeds=np.array([row.seed for row in settings], np.uint64),
        num_logprobs=num_logprobs,
    )
