"""Which vector instructions CTranslate2 is fastest with here. By itself it takes AVX2 even where AVX-512 is.

    python -m antiphon.service.tools.bench.isa FOLDER THREADS

Prints tokens a second of a short greedy run with what CT2_FORCE_CPU_ISA says. The variable is read once a process, so
each choice is tried in one of its own, and set in this one before CTranslate2 is first loaded.
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
# Of one timed run: rows, source and target tokens. Ids that every vocabulary has.
_ROWS, _SOURCE_LEN, _TARGET_LEN = 16, 30, 16
_IDS = range(4, 90)


def choose_isa(folder: Path, threads: int) -> None:
    """Set CT2_FORCE_CPU_ISA to the faster choice for the model in a folder; a value that is set already stays."""
    if VARIABLE in os.environ or not _has_avx512():
        return
    rounds = [{isa: _speed(isa, folder, threads) for isa in _CHOICES} for _ in range(_ROUNDS)]
    best = {isa: max(speeds[isa] for speeds in rounds) for isa in _CHOICES}
    chosen = max(best, key=best.__getitem__)
    if best[chosen]:
        os.environ[VARIABLE] = chosen
        found = ", ".join(f"{isa} {speed:,.0f}" for isa, speed in best.items())
        print(f"antiphon bench:   CTranslate2's instructions: {found} tokens/s; taking {chosen}", file=sys.stderr)


def main() -> None:
    """Measure in this process."""
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
    """Tokens a second; 0 where CTranslate2 refuses."""
    command = (sys.executable, "-m", "antiphon.service.tools.bench.isa", str(folder), str(threads))
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False, env={**os.environ, VARIABLE: isa}
    )
    return float(ended.stdout) if ended.returncode == 0 else 0.0


def _has_avx512() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and " avx512f " in cpuinfo.read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
