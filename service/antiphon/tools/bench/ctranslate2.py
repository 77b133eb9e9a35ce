"""CTranslate2 with the same weights on the same cores, at its best settings for the measured work.

In cases of doubt the comparison favours CTranslate2: it receives all sources at once and may sort them by length,
prompts are converted before the clock starts, and its settings are chosen for each section and number of rows by a run
of the same work. A model with a shortlist is tried with CTranslate2's vocabulary map too, which has the same target
tokens for each source token. CTranslate2 also runs with the vector instructions that are fastest on this machine:

    python -m antiphon.tools.bench.ctranslate2 FOLDER THREADS

prints tokens per second of a short greedy run with the instructions that CT2_FORCE_CPU_ISA names. CTranslate2 takes
AVX2 by default, even if the processor has AVX-512, and reads the variable once per process. Each choice is therefore
tried in its own process, and the best one is set in this process before CTranslate2 is loaded.

This module needs neither torch nor CTranslate2 when it is imported.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.architecture.config import ModelConfig
from antiphon.text.shortlist import Shortlist
from antiphon.tools.bench.corpus import Ids
from antiphon.tools.bench.report import Speed

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "gelu_sigmoid": "GELUSigmoid", "silu": "SWISH"}
"""Names of activations in CTranslate2's enumeration, by ours."""

_CONVERTIBLE: dict[str, tuple[str, ...]] = {
    "architecture": ("encoder-decoder",),
    "positions": ("sinusoidal", "learned", "t5_relative", "rope"),
    "activation": tuple(ACTIVATIONS),
    "decoder_self": ("attention",),
}

VARIABLE = "CT2_FORCE_CPU_ISA"
VMAP_NAME = "vmap.txt"
_CHOICES = ("AVX2", "AVX512")
_ROUNDS = 2
_PATIENCE_S = 120
# Size of one timed run: rows, source tokens and target tokens. Every vocabulary has the ids of _IDS.
_ROWS, _SOURCE_LEN, _TARGET_LEN = 16, 30, 16
_IDS = range(4, 90)

Prompt = list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class CTranslate2Settings:
    """Settings of CTranslate2: its workers, the threads of each worker, and the size of its batches.

    batch_type: unit of max_batch_size: "examples", or "tokens" with padding included.
    use_vmap: choose only among the tokens that the vocabulary map has for the sources of a batch.
    is_lone: sources are sent one by one, each after the answer to the previous one. One row runs at a time, for any
        number of workers.
    """

    workers: int
    threads: int
    max_batch_size: int
    batch_type: str = "examples"
    is_lone: bool = False
    beam_size: int = 1
    use_vmap: bool = False

    def __str__(self) -> str:
        batches = "one at a time" if self.is_lone else f"batches of {self.max_batch_size} {self.batch_type}"
        words = ["CTranslate2 int8", *([os.environ[VARIABLE]] if VARIABLE in os.environ else [])]
        beams = f", {self.beam_size} beams" if self.beam_size > 1 else ""
        vmap = ", vocabulary map" if self.use_vmap else ""
        return f"{' '.join(words)}, {self.workers}x{self.threads} threads, {batches}{beams}{vmap}"


def layouts(threads: int) -> list[tuple[int, int]]:
    """Return every pair (workers, threads of each worker) whose product is `threads`."""
    return [(threads // width, width) for width in range(1, threads + 1) if threads % width == 0]


def decode_candidates(rows: int, threads: int, mean_len: float | None) -> list[CTranslate2Settings]:
    """Return the settings to try for decoding `rows` rows.

    mean_len: mean length of the sources; None if all have the same length. With several workers, two batch sizes are
    tried: `rows` rows in each worker, which is more than Antiphon runs, and `rows` rows in total.
    """
    if rows == 1:
        return [CTranslate2Settings(workers=w, threads=t, max_batch_size=1, is_lone=True) for w, t in layouts(threads)]
    candidates = []
    for workers, width in layouts(threads):
        for size in sorted({rows, -(-rows // workers)}):
            candidates.append(CTranslate2Settings(workers=workers, threads=width, max_batch_size=size))
            if mean_len is not None:
                tokens = max(1, round(size * mean_len))
                candidates.append(
                    CTranslate2Settings(workers=workers, threads=width, max_batch_size=tokens, batch_type="tokens")
                )
    return candidates


def encode_candidates(rows: int, threads: int, lengths: Sequence[int]) -> list[CTranslate2Settings]:
    """Return the settings to try for encoding `rows` sources: in one batch, or in smaller batches of similar length."""
    sizes = [size for shift in range(8) if (size := rows >> shift)]
    total = max(lengths) * rows
    budgets = [total >> shift for shift in range(1, 7) if total >> shift >= max(lengths)]
    return [
        CTranslate2Settings(workers=workers, threads=width, max_batch_size=size, batch_type=batch_type)
        for workers, width in layouts(threads)
        for batch_type, limits in (("examples", sizes), ("tokens", budgets))
        for size in limits
    ]


def write_vmap(shortlist: Shortlist, folder: Path) -> None:
    """Write the vocabulary map of a model with the candidates of a shortlist, before the model is loaded."""
    rules: list[tuple[str, Ids]] = [("", shortlist.always.tolist())]
    for source in range(len(shortlist.offsets) - 1):
        own = [source] if shortlist.has_source_ids else []
        likely = shortlist.target_ids[slice(*shortlist.offsets[source : source + 2])]
        rules.append((str(source), [*own, *likely.tolist()]))
    lines = (f"{source}\t{' '.join(map(str, targets))}\n" for source, targets in rules)
    (folder / VMAP_NAME).write_text("".join(lines), encoding="utf-8")


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
                max_batch_size=settings.max_batch_size, batch_type=settings.batch_type, use_vmap=settings.use_vmap,
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


def obstacle(config: ModelConfig) -> str | None:
    """Return the reason why a model cannot be converted, with field, value and convertible values; None if it can."""
    for field, values in _CONVERTIBLE.items():
        if (value := getattr(config, field)) not in values:
            return f"{field}={value!r} cannot be converted to CTranslate2; {' and '.join(map(repr, values))} can"
    if config.rope_scaling is not None:
        return "rope_scaling cannot be converted to CTranslate2"
    for field in ("post_norms", "attention_cap", "output_cap"):
        if value := getattr(config, field):
            return f"{field}={value} cannot be converted to CTranslate2"
    if config.module_heads is not None:
        return "module_heads cannot be converted to CTranslate2, where all attention modules have num_heads heads"
    return None


def choose_isa(folder: Path, threads: int) -> None:
    """Set CT2_FORCE_CPU_ISA to the faster choice for the model in a folder. Keep a value that is already set."""
    if VARIABLE in os.environ or not _has_avx512():
        return
    rounds = [{isa: _speed(isa, folder, threads) for isa in _CHOICES} for _ in range(_ROUNDS)]
    best = {isa: max(measured[isa] for measured in rounds) for isa in _CHOICES}
    chosen = max(best, key=best.__getitem__)
    if best[chosen]:
        os.environ[VARIABLE] = chosen
        speeds = ", ".join(f"{isa} {speed:,.0f}" for isa, speed in best.items())
        print(f"antiphon bench:   instructions of CTranslate2: {speeds} tokens/s; using {chosen}", file=sys.stderr)


def main() -> None:
    """Measure in this process and print tokens per second."""
    import ctranslate2

    translator = ctranslate2.Translator(sys.argv[1], device="cpu", compute_type="int8", intra_threads=int(sys.argv[2]))
    ids = [str(index) for index in _IDS]
    prompts = [[ids[(row * 7 + place) % len(ids)] for place in range(_SOURCE_LEN)] for row in range(_ROWS)]
    seconds = []
    for _ in range(4):
        started_s = time.perf_counter()
        translator.translate_batch(
            prompts, beam_size=1, min_decoding_length=_TARGET_LEN, max_decoding_length=_TARGET_LEN
        )
        seconds.append(time.perf_counter() - started_s)
    print(_ROWS * _TARGET_LEN / statistics.median(seconds[1:]))


def _speed(isa: str, folder: Path, threads: int) -> float:
    """Return tokens per second, or 0 if CTranslate2 refuses these instructions."""
    command = (sys.executable, "-m", "antiphon.tools.bench.ctranslate2", str(folder), str(threads))
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False, env={**os.environ, VARIABLE: isa}
    )
    return float(ended.stdout) if ended.returncode == 0 else 0.0


def _has_avx512() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and " avx512f " in cpuinfo.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
