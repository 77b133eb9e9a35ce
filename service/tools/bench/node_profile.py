"""Which nodes of the graphs take the time: ONNX Runtime's own profile of real steps, summed by operator.

Profiling slows each node down by the time it takes to write it down: shares, not speeds, are to be read off.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from antiphon.model.bundle.session import profiling
from antiphon.service.tools.bench.setup import Setup, Subject
from antiphon.service.tools.bench.static import translate_static

ROWS = 64
_NODE_SUFFIX = "_kernel_time"


def profile_nodes(setup: Setup) -> str:
    """One table for each graph of each model: operator, runs of its nodes, time and its share."""
    rows = max(setup.rows) if setup.rows else ROWS
    return "\n\n".join(
        f"{subject.name}, {part}, {rows} rows\n{summary(events)}"
        for subject in setup.subjects()
        for part, events in _profiles(subject, setup, rows).items()
    )


def summary(events: Sequence[Mapping[str, Any]]) -> str:
    """Table of the node runs among a profile's events, most time first, and the time of whole runs."""
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
    """Events of the encoder's and the decoder's session over one batch of `rows` sources."""
    with tempfile.TemporaryDirectory(prefix="antiphon-profile-") as folder:
        with profiling(Path(folder) / "session"):
            runner = setup.runner(subject, rows)
        translate_static(
            runner, subject.sources(rows), rows=rows, max_new_tokens=subject.max_new_tokens, is_sorted=False
        )
        del runner
        gc.collect()  # a session writes its profile down when it goes
        profiles = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("session*.json")]
    # Every target has many decoder steps and one encoder run.
    profiles.sort(key=lambda events: sum(event.get("name") == "model_run" for event in events))
    return dict(zip(("encoder", "decoder"), profiles, strict=True))
