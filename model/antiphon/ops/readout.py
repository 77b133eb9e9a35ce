"""Numbers that a client gets from states and from outputs of heads: pooled vectors and scores. Imports no torch.

Axes: S tokens of a source, M width of the states, P poolings, K rows, O outputs of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.heads import EmbeddingConfig, Pooling, Scores

_Floats = NDArray[np.float64]

_POOLINGS: Mapping[Pooling, Callable[[NDArray[np.float32]], NDArray[np.floating]]] = {
    "cls": lambda states: states[0],
    "max": lambda states: states.max(axis=0),
    "mean": lambda states: states.mean(axis=0, dtype=np.float64),
    "mean_sqrt_len_tokens": lambda states: states.sum(axis=0, dtype=np.float64) / np.sqrt(len(states)),
    "weightedmean": lambda states: np.average(states, axis=0, weights=np.arange(1.0, len(states) + 1)),
    "lasttoken": lambda states: states[-1],
}


def pool(states: NDArray[np.float32], poolings: Sequence[Pooling]) -> _Floats:
    """Return the poolings [P * M] of states [S, M], one after the other."""
    return np.concatenate([_POOLINGS[pooling](states).astype(np.float64) for pooling in poolings])


def normalized(vectors: _Floats) -> _Floats:
    """Return vectors [..., M] scaled to length 1; zero vectors stay zero."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.where(lengths == 0.0, 1.0, lengths))


def finished(vector: _Floats, embedding: EmbeddingConfig) -> _Floats:
    """Return the declared embedding for the vector [M] after poolings and dense layer: normalised, then cut."""
    return (normalized(vector) if embedding.normalize else vector)[: embedding.width]


def scores_of(outputs: NDArray[np.float32], scores: Scores) -> _Floats:
    """Return scores [K, O] of outputs [K, O]: softmax of each row, sigmoid of each output, or the outputs unchanged."""
    values = outputs.astype(np.float64)
    if scores == "none":
        return values
    if scores == "sigmoid":
        with np.errstate(over="ignore"):  # outputs far below zero have score 0
            return 1.0 / (1.0 + np.exp(-values))
    raised = np.exp(values - values.max(axis=1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=1, keepdims=True))
