"""Coverage-guided fuzzing (Atheris, libFuzzer) of the functions that read bytes and texts of clients.

    python -m tests.reliability.fuzz messages --seconds 300

Each process runs one target. An exception that is not one of the target's refusals is a finding, and so is a violated
invariant. libFuzzer writes the input to build/reliability/ and prints it, and the process ends with an error.
"""

import argparse
import sys

import atheris

from tests.reliability.sizes import FOLDER

with atheris.instrument_imports(include=["antiphon"], enable_loader_override=False):
    from tests.reliability.fuzz_targets import SEEDS, TARGETS


def main() -> None:
    """Run one target for the given time or number of runs; libFuzzer ends the process."""
    parser = argparse.ArgumentParser(description="Fuzz one target, guided by coverage.")
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--seconds", type=int, default=0, help="0: no limit")
    parser.add_argument("--runs", type=int, default=-1, help="-1: no limit")
    parser.add_argument("--seed", type=int, default=0, help="0: another each time")
    flags = parser.parse_args()
    corpus = FOLDER / "corpus" / flags.target
    corpus.mkdir(parents=True, exist_ok=True)
    for index, seed in enumerate(SEEDS[flags.target]()):
        (corpus / f"seed-{index}").write_bytes(seed)
    options = [
        f"-max_total_time={flags.seconds}",
        f"-runs={flags.runs}",
        f"-seed={flags.seed}",
        "-max_len=16384",
        "-timeout=20",
        f"-artifact_prefix={FOLDER}/{flags.target}-",
        "-print_final_stats=1",
        str(corpus),
    ]
    atheris.Setup([sys.argv[0], *options], TARGETS[flags.target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
