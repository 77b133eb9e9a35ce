"""Names, help texts and buckets of the metrics of the encoder's workspace."""

from __future__ import annotations

from antiphon.observability.metrics.model_families import ModelFamilies

WORKSPACE_BUCKETS_BYTES = tuple(4**power * 1024 for power in range(3, 13))  # 64 KiB to 16 GiB
# Measured over predicted bytes. Not their difference, because OpenMetrics allows no buckets below 0.
QUOTIENT_BUCKETS = (0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)


class WorkspaceFamilies:
    """Families of the encoder's workspace: predicted and measured bytes, by run and by source length."""

    def __init__(self, families: ModelFamilies) -> None:
        name = "encoder_workspace_"
        self.materialised = families.gauge(
            f"{name}predicted_materialised_bytes",
            "Size of one layer's score matrices without fused attention, last encoder run: the sum of H * S^2 * w.",
        )
        self.fused = families.gauge(
            f"{name}predicted_fused_bytes", "Workspace that the bundle's fit predicts for the last encoder run."
        )
        self.measured = families.gauge(f"{name}measured_bytes", "Peak workspace measured in the last encoder run.")
        self.measured_max = families.gauge(
            f"{name}measured_max_bytes", "Largest peak workspace measured in any encoder run."
        )
        self.residual = families.gauge(
            f"{name}residual_bytes", "Measured minus predicted (fused) workspace of the last encoder run."
        )
        self._runs(families, name)
        self._single_source_runs(families)

    def _single_source_runs(self, families: ModelFamilies) -> None:
        self.lone_runs = families.counter(
            "encoder_lone_runs",
            "Encoder runs with a single source, by length: up to source_len tokens.",
            "source_len",
        )
        self.lone_tokens = families.counter("encoder_lone_tokens", "Source tokens of those runs.", "source_len")
        self.lone_workspace = families.counter(
            "encoder_lone_workspace_bytes",
            "Sums over those runs: workspace measured, predicted (fused), and score matrices if stored (materialised).",
            "source_len",
            "kind",
        )

    def _runs(self, families: ModelFamilies, name: str) -> None:
        self.materialised_runs = families.histogram(
            f"{name}predicted_materialised_run_bytes",
            "The same score matrices, of every encoder run.",
            WORKSPACE_BUCKETS_BYTES,
        )
        self.fused_runs = families.histogram(
            f"{name}predicted_fused_run_bytes", "The fit's prediction, of every encoder run.", WORKSPACE_BUCKETS_BYTES
        )
        self.measured_runs = families.histogram(
            f"{name}measured_run_bytes", "Peak workspace measured, of every encoder run.", WORKSPACE_BUCKETS_BYTES
        )
        self.quotient_runs = families.histogram(
            f"{name}measured_to_predicted_ratio",
            "Measured divided by predicted (fused) workspace of every encoder run.",
            QUOTIENT_BUCKETS,
        )

        self.fit = families.gauge(
            f"{name}fit_coefficient",
            "Terms a, b and c of the bundle's fit of an encoder run's workspace, a + B * (b * T + c * T^2) bytes.",
            "term",
        )
        self.fit_residual = families.gauge(
            f"{name}fit_residual_ratio", "Largest relative error of the bundle's fit at its measured points."
        )
