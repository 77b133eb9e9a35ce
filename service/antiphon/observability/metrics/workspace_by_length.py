"""Counts the encoder's workspace by source length, which shows whether memory grows with T or with T².

Counts only runs with a single source, because the workspace of several sources belongs to no single length. The label
has a fixed set of lengths, so it cannot grow with traffic.
"""

from __future__ import annotations

from bisect import bisect_left

from antiphon.observability.metrics.workspace_families import WorkspaceFamilies
from antiphon.runtime.runner import EncodeReport

# In tokens. Each bound is twice the one before, so memory that grows with T² quadruples.
LENGTH_BOUNDS = tuple(2**power for power in range(4, 14))
LENGTHS = (*map(str, LENGTH_BOUNDS), "+Inf")
KINDS = ("measured", "predicted_fused", "predicted_materialised")


class WorkspaceByLength:
    """Counters of one model, shown at zero from the start. For the engine's thread."""

    def __init__(self, families: WorkspaceFamilies, model_name: str) -> None:
        self._runs = [families.lone_runs.labels(model_name, length) for length in LENGTHS]
        self._tokens = [families.lone_tokens.labels(model_name, length) for length in LENGTHS]
        self._bytes = [
            {kind: families.lone_workspace.labels(model_name, length, kind) for kind in KINDS} for length in LENGTHS
        ]

    def note(self, report: EncodeReport) -> None:
        """Count an encoder run under the length of its source, if it had only one."""
        if report.rows != 1:
            return
        place = bisect_left(LENGTH_BOUNDS, report.longest)
        self._runs[place].inc()
        self._tokens[place].inc(report.longest)
        found = (report.peak_workspace_bytes, report.predicted_fused_bytes, report.predicted_materialised_bytes)
        for kind, num_bytes in zip(KINDS, found, strict=True):
            if num_bytes is not None:
                self._bytes[place][kind].inc(num_bytes)
