"""Names for the pattern of an attention head: the place to which most queries attend most.

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
    """Return the pattern of the most attended key of at least half of the queries.

    weights: [T, S] float32; rows sum to 1. keys: the S pieces.

    diagonal: each query attends to the key of its own place, in proportion where T and S differ.
    previous, next: to the place before it, or after it. first: to the first key. separator: to special tokens and
    punctuation. uniform: to all keys alike. mixed: none of them.
    """
    queries, num_keys = weights.shape
    if num_keys < 2 or queries < 2:
        return "mixed"
    if _relative_entropy(weights) >= _NEARLY_UNIFORM:
        return "uniform"
    own = np.arange(queries) if queries == num_keys else _in_proportion(queries, num_keys)
    most = weights.argmax(axis=1)
    is_separator = np.array([piece.strip() in SEPARATORS for piece in keys])
    matches: dict[Pattern, NDArray[np.bool_]] = {
        "diagonal": most == own,
        "previous": most == own - 1,
        "next": most == own + 1,
        "first": most == 0,
        "separator": is_separator[most],
    }
    best = max(matches, key=lambda name: matches[name].sum())
    return best if matches[best].mean() >= _MAJORITY else "mixed"


def _in_proportion(queries: int, num_keys: int) -> NDArray[np.int64]:
    return np.round(np.arange(queries) * (num_keys - 1) / (queries - 1)).astype(np.int64)


def _relative_entropy(weights: NDArray[np.float32]) -> float:
    """Return the mean entropy of the queries, as a share of that of equal weights over the keys they see."""
    positive = np.where(weights > 0, weights, 1.0)
    entropy = -(weights * np.log(positive)).sum(axis=1)
    largest = np.log(np.maximum((weights > 0).sum(axis=1), 2))
    return float((entropy / largest)[1:].mean())
