"""Learned tables of positions of a bundle: constants of a graph of their own, which share the bundle's weights.

Imports no torch.

    {part}_positions   [max_len, W]    vectors of learned positions
    {part}_biases      [H, 2 R + 1]    T5's biases of the distances from -R to R, key minus query
    encoder_distances  [2 R + 1, M]    vectors of these distances, of disentangled attention

Axes: W width of the embeddings, M model width, H heads.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from antiphon.bundle.session import seldom_session
from antiphon.errors import GraphError

Floats = NDArray[np.float32]


def read_position_tables(path: Path) -> dict[str, Floats]:
    """Return the tables of a graph of positions by name, all float32. Raises GraphError naming the file."""
    try:
        session = seldom_session(path, threads=1)
        names = [port.name for port in session.get_outputs()]
        return dict(zip(names, session.run(names, {}), strict=True))
    except Exception as error:  # onnxruntime's exceptions share no narrower base
        raise GraphError(f"{path}: the graph of positions cannot be read: {error}") from error
