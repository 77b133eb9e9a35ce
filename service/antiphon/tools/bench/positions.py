"""Section `positions`: a decoder step by the position of its tokens, with recurrences beside self-attention.

The cache that self-attention reads grows with the position. An SSRU reads two vectors of a layer at every position.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import numpy as np

from antiphon.ops.cache_geometry import blocks_for
from antiphon.tools.bench.report import Case, Finding, alternate
from antiphon.tools.bench.setup import Setup
from antiphon.tools.bench.static import StaticBatch

ROWS = (1, 64)
POSITIONS = (15, 255, 1023)
_RECURRENCES = ("ssru", "average")
_STEPS = 20


def positions(setup: Setup) -> list[Finding]:
    """Measure random models that differ in the decoder's self-attention only."""
    findings = []
    for kind in _RECURRENCES:
        for rows in setup.rows or ROWS:
            ours, theirs = _Steps(setup, kind, rows), _Steps(setup, "attention", rows)
            for position in POSITIONS:
                case = partial(Case, rows=rows, against="self-attention", name="positions", is_ctranslate2=False)
                pairs = alternate(partial(ours.step_us, position), partial(theirs.step_us, position), setup.repeat)
                findings.append(
                    case(case=f"random {setup.preset} with {kind}, step at {position}").finding(pairs, "us")
                )
                held = (ours.cache_kib(position), theirs.cache_kib(position))
                findings.append(case(case=f"{kind}, cache of a target of {position + 1}").finding([held], "KiB"))
    return findings


class _Steps:
    """Steps of a random model whose rows have encoded their sources. The content of their caches does not matter."""

    def __init__(self, setup: Setup, kind: str, rows: int) -> None:
        (subject,) = replace(setup, preset=f"{setup.preset}-{kind}", models=("random",)).subjects()
        self._runner = setup.runner(subject, rows)
        self._batch = StaticBatch(self._runner, subject.sources(rows), POSITIONS[-1] + 1)
        self._batch.encode()

    def step_us(self, position: int) -> float:
        """Return the mean time of a step that feeds tokens at a position."""
        facts = self._runner.facts
        batch = self._batch.input(np.full(self._batch.num_rows, facts.bos_id, np.int64), position)
        started_s = time.perf_counter()
        for _ in range(_STEPS):
            self._runner.decode(batch)
        return (time.perf_counter() - started_s) / _STEPS * 1e6

    def cache_kib(self, position: int) -> float:
        """Return the cache of a row's target up to a position."""
        facts = self._runner.facts
        num_blocks = blocks_for(position + 1, facts.target_block_size)
        return num_blocks * facts.block_size * facts.cache_bytes_per_token / 1024
