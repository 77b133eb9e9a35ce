"""Change one operator, number or condition at a time in named modules, and count the changes that unit tests notice.

    python -m tests.mutants [--sample 40] [--seed 1] [--json FILE] [AREA...]

Needs cosmic-ray (`make mutants` installs it). Works on copies of the checkout without its compiled engine, never in it.
A sample of each area is drawn by its seed, so that two versions of the tests can be compared on the same code.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNIT = "tests/unit"
SCHEDULER = ("scheduler", "admission", "request_queue", "fair_queue", "row_budget", "kv_cache")
# Modules of an area, and the tests that must notice a change in it, those that are likeliest to notice first.
AREAS = {
    "engine": (["engine"], ["engine", "scheduling", "sampling"]),
    "scheduler": (
        [f"engine/{name}.py" for name in SCHEDULER],
        ["scheduling", "engine"],
    ),
    "sampling": (
        ["domain/sampling_params.py", "engine/row_sampling.py", "engine/logits_processors.py", "controls"],
        ["sampling", "engine", "protocols"],
    ),
    "protocols": (["rpc/v1", "rpc/oip"], ["protocols"]),
}  # fmt: skip
# `X | None` of an annotation and decorators of dataclasses change nothing that runs, or everything.
IGNORED = ("BitOr", "BitAnd", "BitXor", "RShift", "LShift", "Decorator")
TIMEOUT_S = 300


@dataclass(frozen=True)
class Mutant:
    """One change of one place, and whether a test failed."""

    area: str
    path: str
    line: int
    change: str
    is_caught: bool


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(AREAS)}; all by default")
    parser.add_argument("--sample", type=int, default=40, help="changes of each area")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write every change and its outcome")
    options = parser.parse_args(arguments)
    mutants: list[Mutant] = []
    with tempfile.TemporaryDirectory() as folder:
        for area in options.areas or AREAS:
            mutants += _run_area(area, options, Path(folder))
            _print_score(area, [mutant for mutant in mutants if mutant.area == area])
    if options.json:
        options.json.write_text(json.dumps([vars(mutant) for mutant in mutants], indent=1) + "\n", encoding="utf-8")
    return 0


def _print_score(area: str, mutants: Sequence[Mutant]) -> None:
    caught = sum(mutant.is_caught for mutant in mutants)
    print(f"{area}: {caught} of {len(mutants)} changes caught, {100 * caught / max(len(mutants), 1):.0f} %", flush=True)
    for mutant in mutants:
        if not mutant.is_caught:
            print(f"    {mutant.path}:{mutant.line}: {mutant.change}", flush=True)


def _run_area(area: str, options: argparse.Namespace, folder: Path) -> list[Mutant]:
    """Divide the sample among copies of the checkout, one for each job, and run them at the same time."""
    modules, tests = AREAS[area]
    sessions = []
    for job in range(options.jobs):
        copy = folder / f"{area}-{job}"
        _copy_checkout(copy)
        sessions.append(_create_session(copy, modules, tests))
    _cosmic_ray(sessions[0].parent, "baseline", "mutants.toml")  # tests that fail by themselves would notice everything
    chosen = _sample(sessions[0], options.sample, options.seed)
    for job, session in enumerate(sessions):
        _keep(session, chosen[job :: options.jobs])
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(_execute, sessions))
    return [mutant for session in sessions for mutant in _results(area, session)]


def _copy_checkout(target: Path) -> None:
    """Copy the committed and changed files, the stubs and the native library; not the compiled engine."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    built = [*ROOT.glob("protos/**/*_pb2*"), *ROOT.glob("model/antiphon/ops/*.so")]
    for path in [*(ROOT / name for name in listed.split("\0") if name), *built]:
        if path.exists():
            copied = target / path.relative_to(ROOT)
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copied)


def _create_session(copy: Path, modules: Sequence[str], tests: Sequence[str]) -> Path:
    paths = [f"service/antiphon/{module}" for module in modules]
    folders = " ".join(f"{UNIT}/{test}" for test in tests)
    command = f"{sys.executable} -m pytest -x -q -n0 -p no:cacheprovider -p no:randomly {folders}"
    (copy / "mutants.toml").write_text(
        f"[cosmic-ray]\nmodule-path = {json.dumps(paths)}\ntimeout = {TIMEOUT_S}.0\nexcluded-modules = []\n"
        f'test-command = "{command}"\n[cosmic-ray.distributor]\nname = "local"\n',
        encoding="utf-8",
    )
    _cosmic_ray(copy, "init", "mutants.toml", "mutants.sqlite")
    return copy / "mutants.sqlite"


def _cosmic_ray(copy: Path, *arguments: str) -> None:
    program = os.environ.get("COSMIC_RAY", str(ROOT / "build" / "cosmic-ray" / "bin" / "cosmic-ray"))
    roots = ["protos", "service", "model", "."]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(str(copy / root) for root in roots)}
    subprocess.run([program, *arguments], cwd=copy, env=environment, check=True)


def _sample(session: Path, size: int, seed: int) -> list[tuple[str, str, str, int, int]]:
    """Draw changes by path, operator and place, since the ids of a session are random."""
    with sqlite3.connect(session) as database:
        rows = database.execute(
            "SELECT module_path, operator_name, operator_args, start_pos_row, start_pos_col FROM mutation_specs"
        ).fetchall()
    useful = sorted(row for row in rows if not any(ignored in row[1] for ignored in IGNORED))
    return random.Random(seed).sample(useful, min(size, len(useful)))


def _keep(session: Path, chosen: Sequence[tuple[str, str, str, int, int]]) -> None:
    kept = set(chosen)
    with sqlite3.connect(session) as database:
        for row in database.execute(
            "SELECT job_id, module_path, operator_name, operator_args, start_pos_row, start_pos_col FROM mutation_specs"
        ).fetchall():
            if row[1:] not in kept:
                database.execute("DELETE FROM mutation_specs WHERE job_id = ?", row[:1])
                database.execute("DELETE FROM work_items WHERE job_id = ?", row[:1])


def _execute(session: Path) -> None:
    _cosmic_ray(session.parent, "exec", "mutants.toml", session.name)


def _results(area: str, session: Path) -> Iterator[Mutant]:
    with sqlite3.connect(session) as database:
        rows = database.execute(
            "SELECT module_path, start_pos_row, operator_name, diff, test_outcome FROM mutation_specs"
            " JOIN work_results USING (job_id) ORDER BY module_path, start_pos_row"
        ).fetchall()
    for path, line, operator, diff, outcome in rows:
        added = [text[1:].strip() for text in (diff or "").splitlines() if text.startswith("+") and text[1:2] != "+"]
        if outcome != "INCOMPETENT":  # not even valid Python
            yield Mutant(area, path, line, " ".join(added) or operator, outcome == "KILLED")


if __name__ == "__main__":
    sys.exit(main())
