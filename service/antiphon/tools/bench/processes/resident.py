"""One side of the memory benchmark: loads a model, translates one batch and reports its resident memory.

    MODULE=antiphon.tools.bench.processes.resident
    python -m $MODULE antiphon BUNDLE MAX_NEW_TOKENS THREADS < sources.json
    python -m $MODULE ctranslate2 FOLDER MAX_NEW_TOKENS WORKERS THREADS SIZE TYPE < sources.json

Prints {loaded_mb, peak_mb}. The peak is VmHWM: ru_maxrss of getrusage would start from the parent's value, which
survives exec. Imports only the libraries of its side.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

Ids = list[int]


def main() -> None:
    """Run the side that the first argument names and print its memory."""
    side, folder, max_new_tokens, *settings = sys.argv[1:]
    sources = json.load(sys.stdin)
    run = _antiphon if side == "antiphon" else _ctranslate2
    loaded_mb = run(Path(folder), sources, int(max_new_tokens), settings)
    json.dump({"loaded_mb": loaded_mb, "peak_mb": resident_mb("VmHWM")}, sys.stdout)


def resident_mb(field: str) -> float:
    """Return a field of this process's status, VmRSS or VmHWM, in MB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024 / 1e6


def _antiphon(folder: Path, sources: list[Ids], max_new_tokens: int, settings: list[str]) -> float:
    from antiphon.bundle.manifest import load_bundle
    from antiphon.runtime.lanes import open_runner
    from antiphon.runtime.warm_up import warm_up
    from antiphon.tools.bench.drivers.offline import Offline

    (threads,) = settings
    rows = len(sources)
    runner = open_runner(load_bundle(folder), max_rows=rows, threads=int(threads))
    warm_up(runner)
    with Offline(runner, rows=rows) as offline:
        loaded_mb = resident_mb("VmRSS")
        offline.translate(sources, concurrency=rows, max_new_tokens=max_new_tokens)
    return loaded_mb


def _ctranslate2(folder: Path, sources: list[Ids], max_new_tokens: int, settings: list[str]) -> float:
    import ctranslate2

    workers, threads, max_batch_size, batch_type = settings
    translator = ctranslate2.Translator(
        str(folder), device="cpu", compute_type="int8", inter_threads=int(workers), intra_threads=int(threads)
    )
    loaded_mb = resident_mb("VmRSS")
    translator.translate_batch(
        [[str(index) for index in source] for source in sources], beam_size=1, max_decoding_length=max_new_tokens,
        max_batch_size=int(max_batch_size), batch_type=batch_type, max_input_length=0,
    )  # fmt: skip
    return loaded_mb


if __name__ == "__main__":
    main()
