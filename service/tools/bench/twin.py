"""CTranslate2 with the same weights on the same cores, at the best settings it has for the work at hand.

Owns its settings and their sweep. Where a rule is open it is read in CTranslate2's favour: it is given all sources at
once and may sort them by length, prompts are converted before the clock runs, and its settings are chosen for each
section and number of rows by a run of that very work.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.service.tools.bench.isa import VARIABLE
from antiphon.service.tools.bench.report import Speed

Prompt = list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class TwinSettings:
    """How CTranslate2 runs: workers of some threads each, and how it cuts what it is given into batches.

    batch_type: whether max_batch_size counts examples or, padding included, tokens.
    is_lone: sources are handed over one by one, each after the answer to the last: one row, whatever the workers.
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
    """Every (workers, threads of each) that uses exactly so many threads."""
    return [(threads // each, each) for each in range(1, threads + 1) if threads % each == 0]


def decode_candidates(rows: int, threads: int, mean_len: float | None) -> list[TwinSettings]:
    """Settings to try for decoding `rows` rows; mean_len of the sources, None where all have one length.

    With several workers a batch may have `rows` rows in each of them, which is more than we have, or `rows` in all.
    """
    if rows == 1:
        return [TwinSettings(workers=w, threads=t, max_batch_size=1, is_lone=True) for w, t in layouts(threads)]
    candidates = []
    for workers, each in layouts(threads):
        for size in sorted({rows, -(-rows // workers)}):
            candidates.append(TwinSettings(workers=workers, threads=each, max_batch_size=size))
            if mean_len is not None:
                tokens = max(1, round(size * mean_len))
                candidates.append(
                    TwinSettings(workers=workers, threads=each, max_batch_size=tokens, batch_type="tokens")
                )
    return candidates


def encode_candidates(rows: int, threads: int, lengths: Sequence[int]) -> list[TwinSettings]:
    """Settings to try for encoding `rows` sources: whole, or cut into ever smaller batches of like lengths."""
    sizes = [size for shift in range(8) if (size := rows >> shift)]
    total = max(lengths) * rows
    budgets = [total >> shift for shift in range(1, 7) if total >> shift >= max(lengths)]
    return [
        TwinSettings(workers=workers, threads=each, max_batch_size=size, batch_type=batch_type)
        for workers, each in layouts(threads)
        for batch_type, held in (("examples", sizes), ("tokens", budgets))
        for size in held
    ]


def prompts_of(sources: Iterable[Sequence[int]]) -> list[Prompt]:
    """Tokens of a twin: its vocabulary is ids in decimal."""
    return [[str(index) for index in source] for source in sources]


class Twin:
    """The CTranslate2 model in a folder, in int8; a translator for each layout, kept once loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._translators: dict[tuple[int, int], Any] = {}

    def translate(
        self, prompts: Sequence[Prompt], settings: TwinSettings, max_new_tokens: int
    ) -> tuple[Speed, list[list[int]]]:
        """Target ids of each source, end tokens left out, and how fast they came (end tokens counted).

        Greedy, or the best of settings.beam_size beams.
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

    def best(self, candidates: Sequence[TwinSettings], prompts: Sequence[Prompt], max_new_tokens: int) -> TwinSettings:
        """The fastest of several settings on these prompts: the better of two runs each, after a short warm-up."""
        speeds = {}
        for settings in candidates:
            self.translate(prompts[:2], settings, max_new_tokens=2)
            runs = [self.translate(prompts, settings, max_new_tokens)[0] for _ in range(2)]
            speeds[settings] = max(run.num_tokens / run.seconds for run in runs)
            print(f"antiphon bench:   {settings}: {speeds[settings]:,.0f} tokens/s", file=sys.stderr)
        return max(speeds, key=speeds.__getitem__)

    def translator(self, workers: int, threads: int) -> Any:
        """The translator of a layout."""
        import ctranslate2

        key = (workers, threads)
        if key not in self._translators:
            self._translators[key] = ctranslate2.Translator(
                str(self._folder), device="cpu", compute_type="int8", inter_threads=workers, intra_threads=threads
            )
        return self._translators[key]
