"""Pooling of the encoder output to one vector."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from antiphon.service.domain.request import Pooling


def pool(states: NDArray[np.float32], pooling: Pooling, *, normalize: bool) -> NDArray[np.float32]:
    """Return states [S, M] pooled to [M] float32; with Pooling.NONE, [S, M].

    normalize: scale vectors to length 1; zero vectors stay zero.
    """
    vectors: NDArray[np.float64]
    if pooling is Pooling.MEAN:
        vectors = states.mean(axis=0, dtype=np.float64)
    elif pooling is Pooling.MAX:
        vectors = states.max(axis=0).astype(np.float64)
    elif pooling is Pooling.NONE:
        vectors = states.astype(np.float64)
    else:
        vectors = states[0].astype(np.float64)
    if normalize:
        lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
        vectors = vectors / np.where(lengths == 0.0, 1.0, lengths)
    return np.asarray(vectors, np.float32)
