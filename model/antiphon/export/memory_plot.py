"""Plot of measured workspace against source length, with the fits, as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from antiphon.bundle.manifest import MemoryFit
from antiphon.bundle.memory_fit import Measurement

_MIB = 1 << 20


def plot_memory(
    path: Path,
    measurements: Mapping[str, Sequence[Measurement]],
    fits: Mapping[str, MemoryFit],
    *,
    num_heads: int,
    title: str,
) -> None:
    """Write one log-log panel at the largest number of rows; the dashed line is one layer's float32 score matrix."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    rows = max(m.rows for measured in measurements.values() for m in measured)
    lengths = np.array(sorted({m.length for measured in measurements.values() for m in measured}))
    for name, measured in measurements.items():
        shown = [m for m in measured if m.rows == rows]
        points = axes.plot([m.length for m in shown], [m.peak_bytes / _MIB for m in shown], "o")
        curve = [fits[name].predict(rows, int(length)) / _MIB for length in lengths]
        label = f"{name}: T^{fits[name].exponent:.2f}"
        axes.plot(lengths, curve, color=points[0].get_color(), label=label)
    scores = rows * num_heads * lengths.astype(float) ** 2 * 4 / _MIB
    axes.plot(lengths, scores, "k--", linewidth=1, label="score matrix of one layer")
    axes.set(
        xscale="log", yscale="log", xlabel="source length T, tokens", ylabel=f"peak workspace, MiB, {rows} rows",
        title=title,
    )  # fmt: skip
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
