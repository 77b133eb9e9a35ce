"""From logits to token ids: greedy for all rows at once, sampled rows one by one.

A row's token depends on its own logits, parameters, seed and position, and on no neighbour: rows are never reduced
together, and the random number comes from a counter, not from a stream that others advance. Ties go to the lowest id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.model.ops.counter_random import uniform_at
from antiphon.service.runner import DecodeBatch, Draw

NUCLEUS_GUESS = 256  # tokens a nucleus is first expected within: sorting these is cheap, the vocabulary is not
SUM_BLOCK = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Warp:
    """How one row's logits become a distribution: temperature above 0, top_k (0 is off), top_p (1 is off)."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0


def sample(logits: NDArray[np.float32], batch: DecodeBatch) -> Draw:
    """Choose one token for each row of a batch, and give the log-probabilities it asks for.

    logits: [R, V] float32 after each row's last token, not changed; -inf forbids a token
    """
    rows = np.arange(len(logits))
    token_ids = logits.argmax(axis=1)
    is_valid = np.isfinite(logits[rows, token_ids])
    for row in np.flatnonzero((batch.temperatures > 0) & is_valid).tolist():
        warp = Warp(
            temperature=float(batch.temperatures[row]), top_k=int(batch.top_ks[row]), top_p=float(batch.top_ps[row])
        )
        uniform = uniform_at(int(batch.seeds[row]), int(batch.positions[batch.offsets[row + 1] - 1]))
        token_ids[row] = sample_row(logits[row], warp, uniform)
    draw = _log_probabilities(logits, np.where(is_valid, token_ids, 0), batch.num_logprobs)
    token_ids[~is_valid] = -1
    return Draw(token_ids, *draw)


def sample_row(logits: NDArray[np.float32], warp: Warp, uniform: float) -> int:
    """Draw from one row [V] of logits, at least one of them finite."""
    ids, weights = distribution(logits, warp)
    index = invert(weights, uniform)
    return index if ids is None else int(ids[index])


def distribution(logits: NDArray[np.float32], warp: Warp) -> tuple[NDArray[np.int64] | None, NDArray[np.float64]]:
    """Ids that may be drawn, rising, and their weights, proportional to probability; ids None is the vocabulary.

    Temperature, then top-k, then top-p of what top-k left.
    """
    vocab_size, maximum = len(logits), float(logits.max())
    top_k = warp.top_k if 0 < warp.top_k < vocab_size else vocab_size
    if warp.top_p >= 1.0:
        count = top_k
        if count == vocab_size:
            return None, _weights(logits, maximum, warp.temperature)
        threshold = float(_largest(logits, count)[0])
    else:
        count, threshold = _nucleus(logits, top_k, warp)
    ids = _at_least(logits, threshold, count)
    return ids, _weights(logits[ids], maximum, warp.temperature)


def invert(weights: NDArray[np.float64], uniform: float) -> int:
    """Index at which the cumulative weight passes `uniform` of the total; never one of weight 0.

    In two levels, blocks and then one block's members: a running sum over a vocabulary costs more than its exp.
    """
    starts = np.arange(0, len(weights), SUM_BLOCK)
    before = np.cumsum(np.add.reduceat(weights, starts))
    point = uniform * float(before[-1])
    block = _passed(before, point)
    if block:
        point -= float(before[block - 1])
    start = block * SUM_BLOCK
    return start + _passed(np.cumsum(weights[start : start + SUM_BLOCK]), point)


def _passed(cumulative: NDArray[np.float64], point: float) -> int:
    # Rounding may push the point past the end, where weights of 0 lie: stop at the last index of any weight.
    last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return min(int(np.searchsorted(cumulative, point, side="right")), last)


def _largest(logits: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """The `count` largest values; the smallest of them comes first, the others in no order (all: as they are)."""
    if count == len(logits):
        return logits
    split = len(logits) - count
    return np.partition(logits, split)[split:]


def _at_least(logits: NDArray[np.float32], threshold: float, count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest, the smallest of which is `threshold`; among equals the lowest ids are kept."""
    ids = np.flatnonzero(logits >= threshold)
    surplus = len(ids) - count
    if surplus > 0:
        ties = np.flatnonzero(logits[ids] == threshold)
        ids = np.delete(ids, ties[len(ties) - surplus :])
    return ids


def _nucleus(logits: NDArray[np.float32], top_k: int, warp: Warp) -> tuple[int, float]:
    """How many of the top_k likeliest tokens reach top_p of their mass, and the logit of the last of those."""
    maximum = float(logits.max())
    candidates = _largest(logits, top_k)
    mass = warp.top_p * float(_weights(candidates, maximum, warp.temperature).sum())
    for guess in (min(NUCLEUS_GUESS, top_k), top_k):
        likely = np.sort(_largest(candidates, guess))[::-1]
        cumulative = np.cumsum(_weights(likely, maximum, warp.temperature))
        if cumulative[-1] >= mass:
            break
    count = min(int(np.searchsorted(cumulative, mass, side="left")) + 1, len(likely))
    return count, float(likely[count - 1])


def _weights(logits: NDArray[np.float32], maximum: float, temperature: float) -> NDArray[np.float64]:
    """exp((logits - maximum) / temperature), in float64."""
    scaled = logits.astype(np.float64)
    scaled -= maximum
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the maximum to -inf, as it should
        scaled /= temperature
    return np.exp(scaled, out=scaled)


def _log_probabilities(
    logits: NDArray[np.float32], token_ids: NDArray[np.int64], num_logprobs: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """logprobs [R], top_ids [R, k] and top_logprobs [R, k] of Draw: of the distribution before it is warped."""
    count = max(num_logprobs, 0)
    if num_logprobs < 0:
        empty = (len(logits), count)
        return np.zeros(len(logits), np.float32), np.zeros(empty, np.int64), np.zeros(empty, np.float32)
    with np.errstate(invalid="ignore"):  # rows that are not finite
        scores = logits.astype(np.float64)
        scores -= scores.max(axis=1, keepdims=True)
        scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    top_ids = np.argsort(-logits, axis=1, kind="stable")[:, :count]
    rows = np.arange(len(logits))
    return (
        scores[rows, token_ids].astype(np.float32),
        top_ids,
        np.take_along_axis(scores, top_ids, axis=1).astype(np.float32),
    )
