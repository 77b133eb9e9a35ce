"""Choice of the vector instructions with which CTranslate2 is fastest on this machine.

CTranslate2 takes AVX2 by default, even if the processor has AVX-512.

    python -m antiphon.tools.bench.ctranslate2.isa FOLDER THREADS

Prints tokens per second of a short greedy run with the instructions that CT2_FORCE_CPU_ISA names. CTranslate2 reads the
variable once per process. Each choice is therefore tried in its own process, and the best one is set in this process
before CTranslate2 is loaded.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

VARIABLE = "CT2_FORCE_CPU_ISA"
_CHOICES = ("AVX2", "AVX512")
_ROUNDS = 2
_PATIENCE_S = 120
# Size of one timed run: rows, source tokens and target tokens. Every vocabulary has the ids of _IDS.
_ROWS, _SOURCE_LEN, _TARGET_LEN = 16, 30, 16
_IDS = range(4, 90)


def choose_isa(folder: Path, threads: int) -> None:
    """Set CT2_FORCE_CPU_ISA to the faster choice for the model in a folder. Keep a value that is already set."""
    if VARIABLE in os.environ or not _has_avx512():
        return
    rounds = [{isa: _speed(isa, folder, threads) for isa in _CHOICES} for _ in range(_ROUNDS)]
    best = {isa: max(speeds[isa] for speeds in rounds) for isa in _CHOICES}
    chosen = max(best, key=best.__getitem__)
    if best[chosen]:
        os.environ[VARIABLE] = chosen
        found = ", ".join(f"{isa} {speed:,.0f}" for isa, speed in best.items())
        print(f"antiphon bench:   instructions of CTranslate2: {found} tokens/s; using {chosen}", file=sys.stderr)


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
    command = (sys.executable, "-m", "antiphon.tools.bench.ctranslate2.isa", str(folder), str(threads))
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False, env={**os.environ, VARIABLE: isa}
    )
    return float(ended.stdout) if ended.returncode == 0 else 0.0


def _has_avx512() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and " avx512f " in cpuinfo.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
