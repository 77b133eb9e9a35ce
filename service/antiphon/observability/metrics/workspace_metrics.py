"""Reports of the encoder's workspace of one model."""

from __future__ import annotations

from antiphon.bundle.manifest import MemoryFit
from antiphon.observability.metrics.workspace_by_length import WorkspaceByLength
from antiphon.observability.metrics.workspace_families import WorkspaceFamilies
from antiphon.runtime.runner import EncodeReport


class WorkspaceMetrics:
    """Metrics of the encoder's workspace of one model. For the engine's thread."""

    def __init__(self, families: WorkspaceFamilies, name: str) -> None:
        self._families = families
        self._name = name
        self._max_measured_bytes = 0
        self._materialised = families.materialised.labels(name)
        self._fused = families.fused.labels(name)
        self._measured = families.measured.labels(name)
        self._measured_max = families.measured_max.labels(name)
        self._residual = families.residual.labels(name)
        self._materialised_runs = families.materialised_runs.labels(name)
        self._fused_runs = families.fused_runs.labels(name)
        self._measured_runs = families.measured_runs.labels(name)
        self._quotient_runs = families.quotient_runs.labels(name)
        self._by_length = WorkspaceByLength(families, name)

    def predicts_by(self, fit: MemoryFit) -> None:
        """Report the fit that predicts the workspace."""
        for term, value in (("a", fit.a), ("b", fit.b), ("c", fit.c)):
            self._families.fit.labels(self._name, term).set(value)
        self._families.fit_residual.labels(self._name).set(fit.residual)

    def encoded(self, report: EncodeReport) -> None:
        """Report the workspace of an encoder run."""
        measured, predicted = report.peak_workspace_bytes, report.predicted_fused_bytes
        self._by_length.note(report)
        self._materialised.set(report.predicted_materialised_bytes)
        self._materialised_runs.observe(report.predicted_materialised_bytes)
        if predicted is not None:
            self._fused.set(predicted)
            self._fused_runs.observe(predicted)
        if measured is not None:
            self._measured.set(measured)
            self._measured_runs.observe(measured)
            self._max_measured_bytes = max(self._max_measured_bytes, measured)
            self._measured_max.set(self._max_measured_bytes)
        if measured is not None and predicted is not None:
            self._residual.set(measured - predicted)
            self._quotient_runs.observe(measured / predicted if predicted else 1.0)
