"""The baseline: static batches through the same graphs and the same sampler.

A batch is formed, encoded and decoded until its last row has ended; then the next one starts. In order of arrival that
is what a server without continuous batching does. Sorted by length first, which live traffic cannot be, it is at its
best: encoder runs are as large as they get, and the rows of a batch end as nearly together as the sources allow.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from antiphon.service import sampler
from antiphon.service.request import SamplingParams
from antiphon.service.runner import Runner


def translate_static(
    runner: Runner, sources: Sequence[Sequence[int]], *, rows: int, max_new_tokens: int, is_sorted: bool
) -> list[list[int]]:
    """Greedy target ids of each source, in order, the end token included where it came.

    is_sorted: batches are formed of neighbours in length, not of neighbours in arrival.
    """
    order = list(range(len(sources)))
    if is_sorted:
        order.sort(key=lambda index: len(sources[index]))
    targets: dict[int, list[int]] = {}
    for start in range(0, len(order), rows):
        members = sorted(order[start : start + rows], key=lambda index: len(sources[index]))
        batch = [sources[index] for index in members]
        _encode(runner, batch)
        targets.update(zip(members, _decode(runner, batch, max_new_tokens), strict=True))
    return [targets[index] for index in range(len(sources))]


def _encode(runner: Runner, batch: Sequence[Sequence[int]]) -> None:
    row = 0
    for _, group in itertools.groupby(batch, key=len):
        sources = list(group)
        runner.encode(sources, row)
        row += len(sources)


def _decode(runner: Runner, batch: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    params = [SamplingParams()] * len(batch)
    token_ids = np.full(len(batch), runner.bos_id, np.int64)
    past_lens = np.zeros(len(batch), np.int32)
    source_lens = np.array([len(source) for source in batch], np.int32)
    target_lens = np.zeros(len(batch), np.int32)
    has_ended = np.zeros(len(batch), bool)
    steps = []
    while not has_ended.all():
        logits = runner.decode(token_ids, past_lens, source_lens)
        token_ids = sampler.sample(logits, params, past_lens, []).token_ids
        steps.append(token_ids)
        past_lens += 1
        target_lens += ~has_ended
        has_ended |= (token_ids == runner.eos_id) | (past_lens >= max_new_tokens)
    columns = np.stack(steps, axis=1).tolist()
    return [column[:length] for column, length in zip(columns, target_lens.tolist(), strict=True)]
