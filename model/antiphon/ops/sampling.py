"""Sampling of next tokens from logits: the parameters of each sample, and the results. Torch-free.

The order of the steps is that of transformers: edits (bias, penalties, constraints), temperature, top-k, top-p, min-p,
typical-p, one random draw. A sample depends on its own logits, parameters, seed and position, and on no other sample:
the random number comes from a counter, not from a stream that other samples advance. Of equal values the lowest id
wins.

Axes: K samples, E edits, V vocabulary, k candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.ops.logits_warpers import Warp, ids_of_largest, sample_token

NOT_FINITE = -1
NONE_ALLOWED = -2
# Values of the parameter `restriction` besides 0, which is none.
EDITED_ONLY = 1
OWN_VOCABULARY = 2
_TINY = float(np.finfo(np.float32).tiny)

FLOAT_PARAMS: Mapping[str, float] = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
"""Columns of SamplingArrays.float_params in their order, with their neutral values.

They are sampling controls under the names of antiphon.controls; kernels know them by their order (sampling_arrays.h).
"""

INT_PARAMS: Mapping[str, int] = {
    "top_k": 0, "seed": 0, "forced_id": -1, "num_logprobs": -1, "is_normalized": 0, "restriction": 0,
}  # fmt: skip
"""Columns of SamplingArrays.int_params in their order, with their neutral values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingArrays:
    """Sampling parameters of K samples; each sample reads the logits after one new token of a step.

    picks [K] int32: the new token of the step whose logits it reads, by index.
    float_params [K, F] float32, columns as in FLOAT_PARAMS:
        temperature: 0 is greedy.
        top_p, min_p, typical_p: 1, 0 and 1 are off. They apply in this order, after top_k, each to the tokens that
            the one before kept, as in transformers.
    int_params [K, I] int64, columns as in INT_PARAMS:
        top_k: 0 is off.
        seed: key of the random number, a uint64 of the same bits; the counter is the position of the picked token.
        forced_id: forced token id, which is scored and not sampled; -1 is none.
        num_logprobs: -1 requests no log-probabilities, 0 the sampled token's, k also those of k candidates.
        is_normalized: 1 edits log-probabilities (a beam), 0 logits.
        restriction: EDITED_ONLY forbids every token that has no edit. OWN_VOCABULARY removes these tokens from the
            vocabulary: neither the sum of exp(logit) nor any other step has them. Then the first edits have rising ids,
            one edit for each token of the vocabulary; edits after them, and a forced token, are of the same ids.
    edit_offsets [K+1] int32: sample i has edits edit_offsets[i] .. edit_offsets[i+1]-1, applied in this order.
    edit_ids [E] int32, edit_values [E, 3] float32: the value v of a token becomes penalised(v + bias) + shift, where
        (bias, penalty, shift) is the edit's and penalised(x) is x / penalty above 0 and x * penalty otherwise. A shift
        of -inf forbids the token. E may be more than edit_offsets[K]. edit_values without rows are neutral: 0, 1 and 0.
    """

    picks: NDArray[np.int32]
    float_params: NDArray[np.float32]
    int_params: NDArray[np.int64]
    edit_offsets: NDArray[np.int32]
    edit_ids: NDArray[np.int32]
    edit_values: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.picks)

    def floats(self, name: str) -> NDArray[np.float32]:
        """Return a view [K] of the column of float_params with this name."""
        return self.float_params[:, _FLOAT_COLUMNS[name]]

    def ints(self, name: str) -> NDArray[np.int64]:
        """Return a view [K] of the column of int_params with this name."""
        return self.int_params[:, _INT_COLUMNS[name]]

    @property
    def seeds(self) -> NDArray[np.uint64]:
        """Return a view [K] of the seeds."""
        return self.ints("seed").view(np.uint64)


_FLOAT_COLUMNS = {name: column for column, name in enumerate(FLOAT_PARAMS)}
_INT_COLUMNS = {name: column for column, name in enumerate(INT_PARAMS)}


def neutral_sampling(num_samples: int) -> SamplingArrays:
    """Return arrays of num_samples samples whose parameters are neutral: greedy, without log-probabilities or edits.

    Every sample picks token 0.
    """
    return SamplingArrays(
        picks=np.zeros(num_samples, np.int32),
        float_params=np.tile(np.array(list(FLOAT_PARAMS.values()), np.float32), (num_samples, 1)),
        int_params=np.tile(np.array(list(INT_PARAMS.values()), np.int64), (num_samples, 1)),
        edit_offsets=np.zeros(num_samples + 1, np.int32),
        edit_ids=np.zeros(0, np.int32),
        edit_values=np.zeros((0, 3), np.float32),
    )


def greedy_sampling(picks: NDArray[np.int32]) -> SamplingArrays:
    """Return parameters that take the likeliest token after each picked one, without log-probabilities or edits."""
    return dataclasses.replace(neutral_sampling(len(picks)), picks=picks)


@dataclass(frozen=True, slots=True)
class Samples:
    """Results of K samples. Log-probabilities are natural, of the model's own distribution before any edit.

    token_ids [K] int64: the forced or sampled token; NOT_FINITE where the logits are not finite, NONE_ALLOWED where
        the edits forbid every token.
    logprobs [K] float32: of these tokens; 0 where none was requested, or where there is no token.
    top_ids [K, k] int64: the candidates whose edited values are largest, largest first, lowest id among equals; -1
        beyond the number that a sample requested, and where a token is forbidden.
    top_logprobs [K, k] float32: of the candidates. top_scores [K, k] float32: their edited values, minus the
        logarithm of the sum of the model's exp(logit): the log-probability where nothing is edited, -inf where there is
        no candidate.
    Valid until the next decode.
    """

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float32]
    top_scores: NDArray[np.float32]


def sample(logits: NDArray[np.float32], sampling: SamplingArrays, positions: NDArray[np.int32]) -> Samples:
    """Sample in NumPy, as the native operator does.

    logits: [K, V] float32, the model's own after each picked token, not changed; -inf forbids a token
    positions: [K] int32 of the picked tokens: the counters of the random numbers
    A forced token is scored and not checked: it is returned even where the edits forbid every token.
    """
    rows = np.arange(len(sampling))
    logits = _selected(logits, sampling)
    likeliest = logits.argmax(axis=1)
    is_finite = np.isfinite(logits[rows, likeliest])
    width = max(0, int(sampling.ints("num_logprobs").max(initial=0)))
    samples = Samples(
        np.where(is_finite, likeliest, NOT_FINITE),
        np.zeros(len(rows), np.float32),
        np.full((len(rows), width), -1, np.int64),
        np.zeros((len(rows), width), np.float32),
        np.full((len(rows), width), -np.inf, np.float32),
    )
    for row in np.flatnonzero(is_finite & _is_more_than_argmax(sampling)).tolist():
        _sample_one(logits[row], sampling, row, int(positions[row]), samples)
    return samples


def _selected(logits: NDArray[np.float32], sampling: SamplingArrays) -> NDArray[np.float32]:
    """Return logits [K, V] that are -inf for tokens that a sample's vocabulary lacks: a copy where there are such."""
    rows = np.flatnonzero(sampling.ints("restriction") == OWN_VOCABULARY).tolist()
    if not rows:
        return logits
    result = logits.copy()
    for row in rows:
        token_ids = sampling.edit_ids[sampling.edit_offsets[row] : sampling.edit_offsets[row + 1]]
        result[row] = -np.inf
        result[row, token_ids] = logits[row, token_ids]
    return result


def _is_more_than_argmax(sampling: SamplingArrays) -> NDArray[np.bool_]:
    """Return [K]: True for samples that need more than the largest logit."""
    has_edits = sampling.edit_offsets[1:] > sampling.edit_offsets[:-1]
    is_edited = has_edits | (sampling.ints("restriction") != 0) | (sampling.ints("is_normalized") != 0)
    is_asked = (
        (sampling.floats("temperature") > 0) | (sampling.ints("forced_id") >= 0) | (sampling.ints("num_logprobs") >= 0)
    )
    return np.asarray(is_edited | is_asked)


def _sample_one(
    logits: NDArray[np.float32], sampling: SamplingArrays, row: int, position: int, samples: Samples
) -> None:
    """Sample from logits [V], of which the largest is finite, and write the result to its row of samples."""
    wanted, is_normalized = int(sampling.ints("num_logprobs")[row]), bool(sampling.ints("is_normalized")[row])
    log_sum = _log_sum(logits) if wanted >= 0 or is_normalized else np.float64(0)
    values = _edited((logits - log_sum).astype(np.float32) if is_normalized else logits, sampling, row)
    token_id = _token(values, sampling, row, position)
    samples.token_ids[row] = token_id
    if wanted >= 0 and token_id >= 0:
        samples.logprobs[row] = logits[token_id] - log_sum
    if wanted > 0:
        top_ids = ids_of_largest(values, wanted)
        top_ids = top_ids[np.argsort(-values[top_ids], kind="stable")]
        top_ids = top_ids[values[top_ids] > -np.inf]
        held = slice(len(top_ids))
        samples.top_ids[row, held] = top_ids
        samples.top_logprobs[row, held] = logits[top_ids] - log_sum
        samples.top_scores[row, held] = values[top_ids] - (0.0 if is_normalized else log_sum)


def _token(values: NDArray[np.float32], sampling: SamplingArrays, row: int, position: int) -> int:
    """Return the token that a sample takes from its edited values [V], or NONE_ALLOWED."""
    if (forced_id := int(sampling.ints("forced_id")[row])) >= 0:
        return forced_id
    likeliest = int(values.argmax())
    if values[likeliest] == -np.inf:
        return NONE_ALLOWED
    if sampling.floats("temperature")[row] == 0:
        return likeliest
    return sample_token(values, warp_of(sampling, row), uniform_at(int(sampling.seeds[row]), position))


def as_float32(value: float) -> float:
    """Return a parameter as float_params holds it: a value above 0 never becomes 0, which has another meaning."""
    return float(np.float32(max(value, _TINY))) if value else 0.0


def warp_of(sampling: SamplingArrays, row: int) -> Warp:
    """Return the parameters by which a sample's distribution is narrowed: top_k and every column of FLOAT_PARAMS."""
    columns = {name: float(sampling.floats(name)[row]) for name in FLOAT_PARAMS}
    return Warp(top_k=int(sampling.ints("top_k")[row]), **columns)


def _edited(values: NDArray[np.float32], sampling: SamplingArrays, row: int) -> NDArray[np.float32]:
    """Return values [V] after a sample's edits: the same array where it has none, and a copy otherwise."""
    edits = slice(int(sampling.edit_offsets[row]), int(sampling.edit_offsets[row + 1]))
    ids, is_restricted = sampling.edit_ids[edits], bool(sampling.ints("restriction")[row])
    if not len(ids) and not is_restricted:
        return values
    result = np.full_like(values, -np.inf) if is_restricted else values.copy()
    result[ids] = values[ids]
    edit_values = sampling.edit_values[edits]
    if not len(edit_values):
        return result
    while len(ids):  # once; or, where a token has several edits, once for its first, once for its second, ...
        held, first = np.unique(ids, return_index=True)
        bias, penalty, shift = edit_values[first].T
        biased = result[held] + bias
        result[held] = np.where(biased > 0, biased / penalty, biased * penalty) + shift
        ids, edit_values = np.delete(ids, first), np.delete(edit_values, first, axis=0)
    return result


def _log_sum(logits: NDArray[np.float32]) -> np.float64:
    """Return log(sum(exp(logits)))."""
    maximum = np.float64(logits.max())
    return np.float64(maximum + np.log(np.exp(logits - maximum).sum()))


def uniform_at(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of a seed and a target position: Philox 4x64 (Salmon et al. 2011).

    seed: the key, below 2^64 (a negative one counts as its 64 bits); position: the counter. The native operator
    computes the same number (native/sampling.cc).
    """
    word: int = np.random.Philox(key=seed % 2**64, counter=position).random_raw()
    return (word >> 11) * 2.0**-53


def seed_of_output(seed: int, index: int) -> int:
    """Return the seed of output `index` of a request: the request's own seed for output 0.

    Further outputs have the numbers that SplitMix64 generates from that seed (Steele et al. 2014, figure 1). These are
    all different and below 2^64.
    """
    if index == 0:
        return seed % 2**64
    word = (seed + index * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31
