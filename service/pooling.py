"""Encoder states of one source to one vector."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from antiphon.service.request import Pooling


def pool(states: NDArray[np.float32], pooling: Pooling, *, normalize: bool) -> NDArray[np.float32]:
    """states [S, M] -> [M] float32, scaled to length 1 where `normalize`; a vector of zeros stays one."""
    vector: NDArray[np.float64]
    if pooling is Pooling.MEAN:
        vector = states.mean(axis=0, dtype=np.float64)
    elif pooling is Pooling.MAX:
        vector = states.max(axis=0).astype(np.float64)
    else:
        vector = states[0].astype(np.float64)
    length = float(np.linalg.norm(vector)) if normalize else 1.0
    return np.asarray(vector / (length or 1.0), np.float32)
