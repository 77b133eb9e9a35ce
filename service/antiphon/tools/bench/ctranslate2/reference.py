"""CTranslate2 with the same weights on the same cores, at its best settings for the measured work.

Owns these settings and the search for the best ones. In cases of doubt the comparison favours CTranslate2: it receives
all sources at once and may sort them by length, prompts are converted before the clock starts, and its settings are
chosen for each section and number of rows by a run of the same work.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.tools.bench.ctranslate2.isa import VARIABLE
from antiphon.tools.bench.report import Speed

Prompt = list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CTranslate2Settings:
    """Settings of CTranslate2: its workers, the threads of each worker, and the size of its batches.

    batch_type: unit of max_batch_size: "examples", or "tokens" with padding included.
    is_lone: sources are sent one by one, each after the answer to the previous one. One row runs at a time, for any
        number of workers.
    """

    workers: int
    threads: int
    max_batch_size: int
    batch_type: str = "examples"
    is_lone: bool = False
    beam_size: int = 1

    def __str__(self) -> str:
        batches = "one at a time" if self.is_lone else f"batches of {self.max_batch_size} {self.batch_type}"
        words = ["CTranslate2 int8", *([os.environ[VARIABLE]] if VARIABLE in os.environ else [])]
        beams = f", {self.beam_size} beams" if self.beam_size > 1 else ""
        return f"{' '.join(words)}, {self.workers}x{self.threads} threads, {batches}{beams}"


def layouts(threads: int) -> list[tuple[int, int]]:
    """Return every pair (workers, threads of each worker) whose product is `threads`."""
    return [(threads // each, each) for each in range(1, threads + 1) if threads % each == 0]


def decode_candidates(rows: int, threads: int, mean_len: float | None) -> list[CTranslate2Settings]:
    """Return the settings to try for decoding `rows` rows.

    mean_len: mean length of the sources; None if all have the same length. With several workers, two batch sizes are
    tried: `rows` rows in each worker, which is more than Antiphon runs, and `rows` rows in total.
    """
    if rows == 1:
        return [CTranslate2Settings(workers=w, threads=t, max_batch_size=1, is_lone=True) for w, t in layouts(threads)]
    candidates = []
    for workers, each in layouts(threads):
        for size in sorted({rows, -(-rows // workers)}):
            candidates.append(CTranslate2Settings(workers=workers, threads=each, max_batch_size=size))
            if mean_len is not None:
                tokens = max(1, round(size * mean_len))
                candidates.append(
                    CTranslate2Settings(workers=workers, threads=each, max_batch_size=tokens, batch_type="tokens")
                )
    return candidates


def encode_candidates(rows: int, threads: int, lengths: Sequence[int]) -> list[CTranslate2Settings]:
    """Return the settings to try for encoding `rows` sources: in one batch, or in smaller batches of similar length."""
    sizes = [size for shift in range(8) if (size := rows >> shift)]
    total = max(lengths) * rows
    budgets = [total >> shift for shift in range(1, 7) if total >> shift >= max(lengths)]
    return [
        CTranslate2Settings(workers=workers, threads=each, max_batch_size=size, batch_type=batch_type)
        for workers, each in layouts(threads)
        for batch_type, limits in (("examples", sizes), ("tokens", budgets))
        for size in limits
    ]


def prompts_of(sources: Iterable[Sequence[int]]) -> list[Prompt]:
    """Convert source ids to tokens of the CTranslate2 model, whose vocabulary is ids in decimal."""
    return [[str(index) for index in source] for source in sources]


class CTranslate2Reference:
    """CTranslate2 model in a folder, run in int8. Keeps one loaded translator for each layout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._translators: dict[tuple[int, int], Any] = {}

    def translate(
        self, prompts: Sequence[Prompt], settings: CTranslate2Settings, max_new_tokens: int
    ) -> tuple[Speed, list[list[int]]]:
        """Translate prompts, greedily or with settings.beam_size beams. Return the speed and the best target of each.

        The speed counts end tokens; the target ids do not include them.
        """
        translator = self.translator(settings.workers, settings.threads)
        parts = [[prompt] for prompt in prompts] if settings.is_lone else [prompts]
        results: list[Any] = []
        started_s = time.perf_counter()
        for part in parts:
            results += translator.translate_batch(
                part, beam_size=settings.beam_size, max_decoding_length=max_new_tokens, max_input_length=0,
                max_batch_size=settings.max_batch_size, batch_type=settings.batch_type,
            )  # fmt: skip
        seconds = time.perf_counter() - started_s
        targets = [[int(token) for token in result.hypotheses[0]] for result in results]
        num_tokens = sum(min(len(target) + 1, max_new_tokens) for target in targets)
        return Speed(num_tokens=num_tokens, seconds=seconds), targets

    def best(
        self, candidates: Sequence[CTranslate2Settings], prompts: Sequence[Prompt], max_new_tokens: int
    ) -> CTranslate2Settings:
        """Return the fastest settings on these prompts: the better of two runs each, after a short warm-up."""
        speeds = {}
        for settings in candidates:
            self.translate(prompts[:2], settings, max_new_tokens=2)
            runs = [self.translate(prompts, settings, max_new_tokens)[0] for _ in range(2)]
            speeds[settings] = max(run.num_tokens / run.seconds for run in runs)
            print(f"antiphon bench:   {settings}: {speeds[settings]:,.0f} tokens/s", file=sys.stderr)
        return max(speeds, key=speeds.__getitem__)

    def translator(self, workers: int, threads: int) -> Any:
        """Return the translator of a layout; load it on first use."""
        import ctranslate2

        key = (workers, threads)
        if key not in self._translators:
            self._translators[key] = ctranslate2.Translator(
                str(self._folder), device="cpu", compute_type="int8", inter_threads=workers, intra_threads=threads
            )
        return self._translators[key]
