"""Check every alert: cause each fault, wait until Alertmanager reports its alerts, repair it, wait until they resolve.

    python -m tests.deploy.alerts_check [--scale 60] [--keep FILE] [FAULT ...]

The exit code is 1 if an alert is not proved. `make alerts-check` keeps what this prints in docs/alerts-check.txt.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.deploy.faults import FAULTS
from tests.deploy.proof import Fault, prove
from tests.deploy.scaling import alert_names
from tests.deploy.watching import Watch, watching

Say = Callable[[str], None]


def check(faults: Sequence[Fault], scale: float, say: Say) -> set[str]:
    """Check the alerts of some faults and report each. Return the names of the checked alerts."""
    proved: set[str] = set()
    with watching(scale) as watch:
        for fault in faults:
            say(f"\n{fault.name}: {fault.cause}; then {fault.cure}")
            try:
                proved |= _proved(fault, watch, say)
            except (AssertionError, pytest.skip.Exception) as problem:
                say(f"  NOT PROVED: {problem}")
        for error in watch.rule_errors():
            say(f"a rule could not be evaluated: {error}")
    return proved


def _proved(fault: Fault, watch: Watch, say: Say) -> set[str]:
    with tempfile.TemporaryDirectory() as folder:
        proofs = prove(fault, watch, Path(folder))
    for proof in proofs:
        times = f"fired {proof.fired_s:5.1f} s after the fault, resolved {proof.resolved_s:5.1f} s after its cure"
        say(f"  {proof.alert:<32} {times}\n    {proof.description}")
    return {proof.alert for proof in proofs}


def _sayer(keep: Path | None) -> Say:
    """Return a function that prints a line, and writes it to a file if one is given."""
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)
        if keep is not None:
            keep.write_text("\n".join(lines) + "\n", encoding="utf-8")

    return say


def main() -> int:
    parser = argparse.ArgumentParser(description="Prove that every alert fires and resolves.")
    parser.add_argument("--scale", type=float, default=60, help="divides every duration of the rules (default: 60)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write there what is printed")
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=f"of {', '.join(fault.name for fault in FAULTS)}")
    flags = parser.parse_args()
    chosen = [fault for fault in FAULTS if not flags.faults or fault.name in flags.faults]
    say = _sayer(flags.keep)
    say(f"Rules of deploy/alerts, every duration divided by {flags.scale:g}; Prometheus scrapes twice a second.")
    proved = check(chosen, flags.scale, say)
    wanted = {name for fault in chosen for name in fault.alerts} if flags.faults else alert_names()
    say(f"\n{len(proved & wanted)} of {len(wanted)} alerts fired and resolved.")
    for name in sorted(wanted - proved):
        say(f"not proved: {name}")
    return 0 if wanted <= proved else 1


if __name__ == "__main__":
    sys.exit(main())
