"""Time of each graph operator: ONNX Runtime's profile of real steps, summed by operator.

Profiling adds the time of recording to each node. The shares are meaningful; the absolute times are too long.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon.bundle.session import profiling
from antiphon.tools.bench.setup import Setup, Subject
from antiphon.tools.bench.static import translate_static

ROWS = 64
_NODE_SUFFIX = "_kernel_time"


def profile_nodes(setup: Setup) -> str:
    """Return a table for each graph of each model: operator, number of node runs, time and share."""
    rows = max(setup.rows) if setup.rows else ROWS
    return "\n\n".join(
        f"{subject.name}, {part}, {rows} rows\n{summary(events)}"
        for subject in setup.subjects()
        for part, events in _profiles(subject, setup, rows).items()
    )


def summary(events: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the node runs in a profile's events, longest time first, and the time of whole runs."""
    microseconds: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "Node" and str(event.get("name", "")).endswith(_NODE_SUFFIX):
            op_type = event["args"]["op_name"]
            microseconds[op_type] += event["dur"]
            count[op_type] += 1
    total = microseconds.total() or 1
    lines = [f"{'operator':<32} {'count':>8} {'us':>12} {'share':>7}"]
    lines += [
        f"{op_type:<32} {count[op_type]:>8} {spent:>12,} {spent / total:>7.1%}"
        for op_type, spent in microseconds.most_common()
    ]
    runs = [event["dur"] for event in events if event.get("name") == "model_run"]
    return "\n".join(
        [*lines, f"{'nodes / whole runs':<32} {len(runs):>8} {microseconds.total():>12,} of {sum(runs):,}"]
    )


def _profiles(subject: Subject, setup: Setup, rows: int) -> dict[str, list[dict[str, Any]]]:
    """Return the events of the encoder's and the decoder's session for one batch of `rows` sources."""
    with tempfile.TemporaryDirectory(prefix="antiphon-profile-") as folder:
        with profiling(Path(folder) / "session"):
            runner = setup.runner(subject, rows)
        translate_static(
            runner, subject.sources(rows), rows=rows, max_new_tokens=subject.max_new_tokens, is_sorted=False
        )
        del runner
        gc.collect()  # a session writes its profile when it is destroyed
        profiles = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("session*.json")]
    # Every target has many decoder steps and one encoder run: the encoder's profile has fewer runs.
    profiles.sort(key=lambda events: sum(event.get("name") == "model_run" for event in events))
    return dict(zip(("encoder", "decoder"), profiles, strict=True))
