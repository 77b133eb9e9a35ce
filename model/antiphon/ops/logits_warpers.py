"""Logits warpers: temperature, top-k, top-p, min-p and typical-p, for one row of logits, and their stages. Torch-free.

Each warper acts on the tokens that the previous warper kept, renormalised, as in transformers 5.23, with one
difference. In transformers top-k keeps all tokens whose logit equals the k-th. Here it keeps k tokens, of equal ones
those of the lowest ids, and top-p likewise keeps the fewest tokens. Weights are proportional to probability, the weight
of the likeliest token is 1, and all arithmetic is float64. The stages are the distributions after each step, for the
analysis of controls; they do not know how the model and the logits processors computed their values.

Axes: V vocabulary.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

NUCLEUS_GUESS = 256  # tokens sorted first to find those of top-p: fast, unlike sorting the vocabulary
SUM_BLOCK = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Warp:
    """Parameters of the warpers: temperature above 0; top_k 0, top_p 1, min_p 0 and typical_p 1 are off."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0


def sample_token(logits: NDArray[np.float32], warp: Warp, uniform: float) -> int:
    """Sample a token from one row [V] of logits, of which the largest is finite; -inf forbids a token."""
    ids, weights = distribution(logits, warp)
    index = invert(weights, uniform)
    return index if ids is None else int(ids[index])


def distribution(logits: NDArray[np.float32], warp: Warp) -> tuple[NDArray[np.int64] | None, NDArray[np.float64]]:
    """Return the ids that can be drawn, rising, and their weights; ids None is the whole vocabulary."""
    ids, weights = _likeliest(logits, warp)
    if warp.min_p > 0.0:
        ids, weights = _masked(ids, weights, weights >= warp.min_p)
    if warp.typical_p < 1.0:
        ids, weights = _masked(ids, weights, _is_typical(weights, warp.typical_p))
    return ids, weights


def invert(weights: NDArray[np.float64], uniform: float) -> int:
    """Return the index at which the cumulative weight passes `uniform` of the total; never one of weight 0.

    Searches blocks first and then one block, since a running sum over a vocabulary costs more than its exp.
    """
    starts = np.arange(0, len(weights), SUM_BLOCK)
    before = np.cumsum(np.add.reduceat(weights, starts))
    point = uniform * float(before[-1])
    block = _index_at(before, point)
    if block:
        point -= float(before[block - 1])
    start = block * SUM_BLOCK
    return start + _index_at(np.cumsum(weights[start : start + SUM_BLOCK]), point)


def ids_of_largest(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the ids of the `count` largest values, or of all, rising; of equal values the lowest ids."""
    count = min(count, len(values))
    return _at_least(values, float(_largest(values, count).min()), count)


def _likeliest(logits: NDArray[np.float32], warp: Warp) -> tuple[NDArray[np.int64] | None, NDArray[np.float64]]:
    """Return ids and weights after temperature, top-k and top-p, which keep the likeliest: one threshold is enough."""
    vocab_size, maximum = len(logits), float(logits.max())
    top_k = warp.top_k if 0 < warp.top_k < vocab_size else vocab_size
    if warp.top_p >= 1.0:
        count = top_k
        if count == vocab_size:
            return None, _weights(logits, maximum, warp.temperature)
        threshold = float(_largest(logits, count)[0])
    else:
        count, threshold = _top_p_threshold(logits, top_k, warp)
    ids = _at_least(logits, threshold, count)
    return ids, _weights(logits[ids], maximum, warp.temperature)


def _is_typical(weights: NDArray[np.float64], mass: float) -> NDArray[np.bool_]:
    """Return True for locally typical tokens (Meister et al. 2022): those whose surprise is nearest to the entropy.

    These are the fewest tokens that reach `mass`, and all tokens that are as near as the last of them.
    """
    probabilities = weights / weights.sum()
    # A token of weight 0 has infinite surprise and adds nothing to the entropy.
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(probabilities)
        entropy = np.nansum(probabilities * surprise)
    distance = np.abs(surprise - entropy)
    order = np.argsort(distance)
    last = int((np.cumsum(probabilities[order]) < mass).sum())
    is_typical: NDArray[np.bool_] = distance <= distance[order[min(last, len(order) - 1)]]
    return is_typical


def _masked(
    ids: NDArray[np.int64] | None, weights: NDArray[np.float64], mask: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the ids and weights where the mask is True; weights are not rescaled, since only their ratios count."""
    return np.flatnonzero(mask) if ids is None else ids[mask], weights[mask]


def _index_at(cumulative: NDArray[np.float64], point: float) -> int:
    # Rounding can move the point past the end, among weights of 0: stop at the last index that has a weight.
    last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return min(int(np.searchsorted(cumulative, point, side="right")), last)


def _largest(logits: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """Return the `count` largest values, the smallest first and the others in no order; all values stay in place."""
    if count == len(logits):
        return logits
    split = len(logits) - count
    return np.partition(logits, split)[split:]


def _at_least(logits: NDArray[np.float32], threshold: float, count: int) -> NDArray[np.int64]:
    """Return the ids of the `count` largest logits, whose smallest is `threshold`; of equal logits the lowest ids."""
    ids = np.flatnonzero(logits >= threshold)
    surplus = len(ids) - count
    if surplus > 0:
        ties = np.flatnonzero(logits[ids] == threshold)
        ids = np.delete(ids, ties[len(ties) - surplus :])
    return ids


def _top_p_threshold(logits: NDArray[np.float32], top_k: int, warp: Warp) -> tuple[int, float]:
    """Return the number of the top_k likeliest tokens that reach top_p of their mass, and the logit of the last one."""
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
    """Return exp((logits - maximum) / temperature)."""
    scaled = logits.astype(np.float64)
    scaled -= maximum
    with np.errstate(over="ignore"):  # a tiny temperature changes all but the maximum to -inf, which is correct
        scaled /= temperature
    return np.exp(scaled, out=scaled)


Floats = NDArray[np.float64]


class Stage(enum.Enum):
    """Steps from the model's distribution to the one that is sampled, in their order."""

    MODEL = "model"
    LOGITS_PROCESSORS = "logits_processors"
    TEMPERATURE = "temperature"
    TOP_K = "top_k"
    TOP_P = "top_p"
    MIN_P = "min_p"
    TYPICAL_P = "typical_p"


@dataclass(frozen=True, slots=True, eq=False)
class StageDistribution:
    """Distribution after one stage.

    logprobs [V] float64: natural log-probabilities; -inf for a token that cannot be sampled. If no token is left, all
        are -inf.
    """

    stage: Stage
    logprobs: Floats

    @property
    def num_kept(self) -> int:
        """Number of tokens that can be sampled."""
        return int((self.logprobs > -np.inf).sum())

    @property
    def entropy(self) -> float:
        """Entropy in nats; 0 for at most one token."""
        kept = self.logprobs[self.logprobs > -np.inf]
        return 0.0 - float((np.exp(kept) * kept).sum())  # never -0.0


def sampling_stages(
    logprobs: NDArray[np.float32], scores: NDArray[np.float32], warp: Warp, *, forced_id: int | None = None
) -> tuple[StageDistribution, ...]:
    """Return the distribution after every stage; a stage without effect repeats the one before, bit by bit.

    logprobs [V]: log-probabilities under the model; -inf for a token that it excludes.
    scores [V]: values after the logits processors, up to a constant; -inf for a forbidden token. Where no processor
        changed a token, they are equal to logprobs.
    warp: parameters of the other stages; temperature 0 keeps only the likeliest token, of equal ones the lowest id.
    forced_id: the only token that stays after the processors stage, for any score.
    """
    current = logprobs.astype(np.float64)
    stages = [StageDistribution(Stage.MODEL, current)]
    current = _processed(current, logprobs, scores, forced_id)
    stages.append(StageDistribution(Stage.LOGITS_PROCESSORS, current))
    is_decided = forced_id is not None or not (scores > -np.inf).any()
    if warp.temperature == 0 and not is_decided:
        current, is_decided = _only(int(scores.argmax()), len(scores)), True
    before = Warp(temperature=1.0)
    for stage, after in _warps(warp):
        if not is_decided and after != before:
            current = _warped(scores, after)
        stages.append(StageDistribution(stage, current))
        before = after
    return tuple(stages)


def likeliest_ids(values: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the ids of the `count` largest values [V], largest first, lowest id among equals; none of -inf."""
    ids = ids_of_largest(values, count)
    ids = ids[np.argsort(-values[ids], kind="stable")]
    return ids[values[ids] > -np.inf]


def _warps(warp: Warp) -> list[tuple[Stage, Warp]]:
    """Return the parameters up to each stage; those of later stages are off."""
    temperature = Warp(temperature=warp.temperature)
    top_k = replace(temperature, top_k=warp.top_k)
    top_p = replace(top_k, top_p=warp.top_p)
    min_p = replace(top_p, min_p=warp.min_p)
    return [
        (Stage.TEMPERATURE, temperature),
        (Stage.TOP_K, top_k),
        (Stage.TOP_P, top_p),
        (Stage.MIN_P, min_p),
        (Stage.TYPICAL_P, replace(min_p, typical_p=warp.typical_p)),
    ]


def _processed(
    current: Floats, logprobs: NDArray[np.float32], scores: NDArray[np.float32], forced_id: int | None
) -> Floats:
    if forced_id is not None:
        return _only(forced_id, len(scores))
    if np.array_equal(scores, logprobs) or not (scores > -np.inf).any():
        return scores.astype(np.float64)
    return _warped(scores, Warp(temperature=1.0))


def _warped(scores: NDArray[np.float32], warp: Warp) -> Floats:
    """Return the log-probabilities [V] of the distribution that a warp leaves."""
    ids, weights = distribution(scores, warp)
    with np.errstate(divide="ignore"):  # a weight of 0 cannot be sampled
        logs: Floats = np.log(weights) - np.log(weights.sum())
    if ids is None:
        return logs
    logprobs = np.full(len(scores), -np.inf)
    logprobs[ids] = logs
    return logprobs


def _only(token_id: int, vocab_size: int) -> Floats:
    logprobs = np.full(vocab_size, -np.inf)
    logprobs[token_id] = 0.0
    return logprobs
