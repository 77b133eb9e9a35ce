"""Resident memory of several processes together: pages that they share count once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import Metric

FAMILY = "process_resident_memory_bytes"


def proportional_bytes(pids: Iterable[int]) -> int:
    """Return the sum of the proportional set sizes (proc(5)) of processes. One that has ended counts nothing."""
    return sum(_of_one(pid) for pid in pids)


def set_resident(metrics: Iterable[Metric], num_bytes: int) -> None:
    """Replace the resident memory among the metrics of a server."""
    for family in metrics:
        if family.name == FAMILY:
            family.samples = []
            family.add_sample(FAMILY, {}, num_bytes)


def _of_one(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
