"""Names for the pattern of an attention head: the place that receives most of its attention.

Patterns that studies of trained models found in many heads (Clark et al. 2019, Voita et al. 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Pattern = Literal["diagonal", "previous", "next", "first", "separator", "uniform", "mixed"]

SEPARATORS = frozenset({"</s>", "<s>", "[SEP]", "[CLS]", "<|endoftext|>", "<eos>", "<pad>", ".", ","})
"""Special tokens and punctuation on which heads rest that have nothing to look for."""

_MAJORITY = 0.5
_NEARLY_UNIFORM = 0.9  # of the largest possible entropy


def pattern_of(weights: NDArray[np.float32], keys: Sequence[str]) -> Pattern:
    """Return the pattern that receives at least half of the attention, the most specific one first.

    weights: [T, S] float32; rows sum to 1. keys: the S pieces.

    diagonal: each query attends to the key of its own place, in proportion where T and S differ.
    previous, next: to the place before it, or after it. first: to the first key. separator: to special tokens and
    punctuation. uniform: to all keys alike. mixed: none of them.
    """
    queries, num_keys = weights.shape
    if num_keys < 2 or queries < 2:
        return "mixed"
    places = np.arange(queries) if queries == num_keys else _in_proportion(queries, num_keys)
    shares: dict[Pattern, float] = {
        "diagonal": _share(weights, places),
        "previous": _share(weights, places - 1),
        "next": _share(weights, places + 1),
        "first": float(weights[1:, 0].mean()),
        "separator": float(weights[:, [piece.strip() in SEPARATORS for piece in keys]].sum(axis=1).mean()),
    }
    best = max(shares, key=shares.__getitem__)
    if shares[best] >= _MAJORITY:
        return best
    return "uniform" if _relative_entropy(weights) >= _NEARLY_UNIFORM else "mixed"


def _in_proportion(queries: int, num_keys: int) -> NDArray[np.int64]:
    return np.round(np.arange(queries) * (num_keys - 1) / (queries - 1)).astype(np.int64)


def _share(weights: NDArray[np.float32], places: NDArray[np.int64]) -> float:
    """Return the mean weight at one key of each query [T], of the queries for which this key exists."""
    rows = np.flatnonzero((places >= 0) & (places < weights.shape[1]))
    return float(weights[rows, places[rows]].mean()) if len(rows) else 0.0


def _relative_entropy(weights: NDArray[np.float32]) -> float:
    """Return the mean entropy of the queries, as a share of that of equal weights over the keys they see."""
    positive = np.where(weights > 0, weights, 1.0)
    entropy = -(weights * np.log(positive)).sum(axis=1)
    largest = np.log(np.maximum((weights > 0).sum(axis=1), 2))
    return float((entropy / largest)[1:].mean())
