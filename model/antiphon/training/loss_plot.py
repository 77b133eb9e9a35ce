"""The picture of a training run: loss over steps."""

from __future__ import annotations

import json
from pathlib import Path


def plot_losses(metrics: Path, target: Path) -> None:
    """Draw training and validation loss, in nats per label, over steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, label in (("train_loss", "training (label-smoothed)"), ("valid_loss", "validation")):
        axes.plot([r["step"] for r in records], [r[name] for r in records], label=label)
    axes.set(xlabel="step", ylabel="nats per label")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
