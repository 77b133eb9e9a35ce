"""From logits to token ids: greedy for all rows at once, sampled rows one by one.

A row's token depends on its own logits, parameters, seed and position, and on no neighbour: rows are never reduced
together, and the random number comes from a counter, not from a stream that others advance. Ties go to the lowest id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.service.request import SamplingParams

Floats = NDArray[np.float32] | NDArray[np.float64]

# First guess at how many tokens a nucleus holds, and how the guess grows: most need only a small partial sort.
NUCLEUS_GUESS = 64
NUCLEUS_GROWTH = 8


@dataclass(frozen=True, slots=True)
class Draw:
    """Chosen token_ids [B] int64, and is_valid [B] bool: False where a row's logits are not finite."""

    token_ids: NDArray[np.int64]
    is_valid: NDArray[np.bool_]


def sample(
    logits: NDArray[np.float32], params: list[SamplingParams], positions: NDArray[np.int32], sampled_rows: list[int]
) -> Draw:
    """Choose one token for each row.

    logits:       [B, V] float32, not changed; -inf forbids a token
    params:       of B rows
    positions:    [B] int32, target tokens generated before this one
    sampled_rows: the rows whose temperature is not 0
    """
    token_ids = logits.argmax(axis=1)
    is_valid = np.isfinite(logits[np.arange(len(logits)), token_ids])
    for row in sampled_rows:
        if is_valid[row]:
            uniform = uniform_at(params[row].seed, int(positions[row]))
            token_ids[row] = sample_row(logits[row], params[row], uniform)
    return Draw(token_ids, is_valid)


def uniform_at(seed: int, position: int) -> float:
    """The random number in [0, 1) of a seed and a target position: Philox 4x64, key = seed, counter = position."""
    word: int = np.random.Philox(key=seed, counter=position).random_raw()
    return (word >> 11) * 2.0**-53


def sample_row(logits: NDArray[np.float32], params: SamplingParams, uniform: float) -> int:
    """Draw from one row [V] of logits, at least one of them finite, by inverting the cumulative distribution."""
    ids, weights = distribution(logits, params)
    cumulative = np.cumsum(weights)
    # Rounding may push the point past the end, where ids of weight 0 lie: stop at the last id of any weight.
    last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    chosen = min(index, last)
    return chosen if ids is None else int(ids[chosen])


def distribution(
    logits: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[np.int64] | None, NDArray[np.float64]]:
    """Ids that may be drawn and their weights, proportional to probability: temperature, then top-k, then top-p.

    ids are in order of falling probability, or None for every id of the vocabulary in order.
    """
    vocab_size = len(logits)
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    maximum = float(logits.max())
    if not top_k and params.top_p >= 1.0:
        return None, _weights(logits, maximum, params.temperature)
    if top_k:
        ids = likeliest(logits, top_k)
        weights = _weights(logits[ids], maximum, params.temperature)
        count = nucleus_size(weights, params.top_p * float(weights.sum())) if params.top_p < 1.0 else len(ids)
        return ids[:count], weights[:count]
    return _nucleus(logits, _weights(logits, maximum, params.temperature), params.top_p)


def likeliest(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest of a row, largest first; among equals the lowest id."""
    if count < len(logits):
        split = len(logits) - count
        threshold = np.partition(logits, split)[split]
        above = np.flatnonzero(logits > threshold)
        ties = np.flatnonzero(logits == threshold)[: count - len(above)]
        ids = np.concatenate((above, ties))
        ids.sort()
    else:
        ids = np.arange(len(logits))
    return ids[np.argsort(-logits[ids], kind="stable")]


def nucleus_size(weights: NDArray[np.float64], mass: float) -> int:
    """How many of the weights, largest first, it takes to reach `mass`; all of them where they do not."""
    return min(int(np.searchsorted(np.cumsum(weights), mass, side="left")) + 1, len(weights))


def _nucleus(
    logits: NDArray[np.float32], weights: NDArray[np.float64], top_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    mass = top_p * float(weights.sum())
    guess = NUCLEUS_GUESS
    while True:
        ids = likeliest(logits, guess)
        likely = weights[ids]
        if guess >= len(logits) or likely.sum() >= mass:
            count = nucleus_size(likely, mass)
            return ids[:count], likely[:count]
        guess *= NUCLEUS_GROWTH


def _weights(logits: NDArray[np.float32], maximum: float, temperature: float) -> NDArray[np.float64]:
    """exp((logits - maximum) / temperature), in float64."""
    scaled = logits.astype(np.float64)
    scaled -= maximum
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the maximum to -inf, as it should
        scaled /= temperature
    return np.exp(scaled, out=scaled)
