"""Sizes of the tests, small in CI and full if a make target sets the variables, and files of their figures."""

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PREFIX = "ANTIPHON_RELIABILITY_"


def size(name: str, short: int) -> int:
    """Return a count, or whole seconds, from ANTIPHON_RELIABILITY_<name>, or `short` if that is not set."""
    return int(os.environ.get(PREFIX + name, short))


FOLDER = Path(__file__).parents[2] / "build" / "reliability"


def report(name: str, figures: dict[str, Any], *, is_quiet: bool = False, folder: Path = FOLDER) -> Path:
    """Write build/reliability/NAME.json atomically and, by default, print it. Return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    about = {"name": name, "time": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "machine": _machine()}
    text = json.dumps(about | figures, indent=1, ensure_ascii=False)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)
    if not is_quiet:
        sys.stdout.write(json.dumps(figures, ensure_ascii=False) + "\n")
        sys.stdout.flush()
    return path


def _machine() -> str:
    model = next(
        (line.partition(": ")[2] for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
