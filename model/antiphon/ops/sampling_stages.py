"""Distribution of one next token after each step of its sampling, for the analysis of controls. Torch-free.

The model's log-probabilities, the logits processors, then temperature, top-k, top-p, min-p and typical-p in the order
and with the arithmetic of logits_warpers.py. Does not know how the model and the processors computed their values.

Axes: V vocabulary.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from antiphon.ops.logits_warpers import Warp, distribution, ids_of_largest

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
    forced_id: the only token left after the processors stage, whatever its score.
    """
    current = logprobs.astype(np.float64)
    found = [StageDistribution(Stage.MODEL, current)]
    current = _processed(current, logprobs, scores, forced_id)
    found.append(StageDistribution(Stage.LOGITS_PROCESSORS, current))
    is_decided = forced_id is not None or not (scores > -np.inf).any()
    if warp.temperature == 0 and not is_decided:
        current, is_decided = _only(int(scores.argmax()), len(scores)), True
    before = Warp(temperature=1.0)
    for stage, after in _warps(warp):
        if not is_decided and after != before:
            current = _warped(scores, after)
        found.append(StageDistribution(stage, current))
        before = after
    return tuple(found)


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
