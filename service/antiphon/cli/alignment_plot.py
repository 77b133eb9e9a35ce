"""Heat map of attention weights as PNG, with the pieces of source and target on its axes. Needs matplotlib."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Size of a cell, of the labels at the axes, and maximum size of the figure, in inches.
_CELL, _MARGIN, _LONGEST = 0.32, 2.0, 60.0


def plot_alignment(
    path: Path,
    weights: Sequence[Sequence[float]],
    source_pieces: Sequence[str],
    target_pieces: Sequence[str],
    *,
    title: str,
) -> None:
    """Write the heat map of weights [T, S]: a row for each of T target pieces, a column for each of S source pieces."""
    width, height = (min(_CELL * len(pieces) + _MARGIN, _LONGEST) for pieces in (source_pieces, target_pieces))
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(weights, cmap="Blues", vmin=0, aspect="auto")
    # Pieces are text, not formulas: matplotlib must not interpret dollar signs.
    axes.set_xticks(range(len(source_pieces)), source_pieces, rotation=90, parse_math=False)
    axes.set_yticks(range(len(target_pieces)), target_pieces, parse_math=False)
    axes.set(xlabel="source", ylabel="target")
    axes.set_title(title, fontsize="small", wrap=True)
    figure.colorbar(image, ax=axes, label="weight")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # characters that the font lacks are drawn as boxes
        figure.savefig(path, format="png", dpi=120)
