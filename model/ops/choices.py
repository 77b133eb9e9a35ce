"""Sampling of next tokens from logits: the parameters of each choice, and its result. Torch-free.

The order of the steps is that of transformers: edits (bias, penalties, constraints), temperature, top-k, top-p, min-p,
typical-p, one draw. A choice depends on its own logits, parameters, seed and position, and on no other choice: the
random number comes from a counter, not from a stream that other choices advance. Of equal values the lowest id wins.

Axes: K choices, E edits, V vocabulary, k candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.model.ops.counter_random import uniform_at
from antiphon.model.ops.warpers import Warp, draw_from, ids_of_largest

NOT_FINITE = -1
NONE_ALLOWED = -2


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """Sampling parameters of K choices; each choice reads the logits after one new token of a step.

    picks [K] int32: the new token of the step whose logits it reads, by index.
    temperatures [K] float32: 0 is greedy. top_ks [K] int32: 0 is off. top_ps, min_ps, typical_ps [K] float32: 1, 0 and
        1 are off. They apply in this order, each to the tokens that the one before kept, as in transformers.
    seeds [K] uint64: key of the random number; the counter is the position of the picked token.
    given_ids [K] int64: forced token id, which is scored and not sampled; -1 is none.
    num_logprobs [K] int32: -1 asks for no log-probabilities, 0 for the chosen token's, k also for k candidates.
    is_normalized [K] int32: 1 edits log-probabilities (a beam), 0 logits.
    is_exclusive [K] int32: 1 forbids every token that has no edit.
    edit_offsets [K+1] int32: choice i has edits edit_offsets[i] .. edit_offsets[i+1]-1, applied in this order.
    edit_ids [E] int32, edit_values [E, 3] float32: the value v of a token becomes penalised(v + bias) + shift, where
        (bias, penalty, shift) is the edit's and penalised(x) is x / penalty above 0 and x * penalty otherwise. A shift
        of -inf forbids the token. E may be more than edit_offsets[K].
    """

    picks: NDArray[np.int32]
    temperatures: NDArray[np.float32]
    top_ks: NDArray[np.int32]
    top_ps: NDArray[np.float32]
    min_ps: NDArray[np.float32]
    typical_ps: NDArray[np.float32]
    seeds: NDArray[np.uint64]
    given_ids: NDArray[np.int64]
    num_logprobs: NDArray[np.int32]
    is_normalized: NDArray[np.int32]
    is_exclusive: NDArray[np.int32]
    edit_offsets: NDArray[np.int32]
    edit_ids: NDArray[np.int32]
    edit_values: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.picks)


PER_CHOICE: Mapping[str, tuple[type[np.generic], int]] = {
    "picks": (np.int32, 0),
    "temperatures": (np.float32, 0),
    "top_ks": (np.int32, 0),
    "top_ps": (np.float32, 1),
    "min_ps": (np.float32, 0),
    "typical_ps": (np.float32, 1),
    "seeds": (np.uint64, 0),
    "given_ids": (np.int64, -1),
    "num_logprobs": (np.int32, -1),
    "is_normalized": (np.int32, 0),
    "is_exclusive": (np.int32, 0),
}
"""Fields of Choices that have one element a choice, in their order: element type, and the neutral value.

Inputs of the native decoder graph, operands of Select and the arrays of running rows come from this table.
"""


def neutral_choices(num_choices: int) -> Choices:
    """Return choices whose settings all have their neutral values, in arrays of their own."""
    settings: dict[str, NDArray[Any]] = {
        name: np.full(num_choices, neutral, dtype) for name, (dtype, neutral) in PER_CHOICE.items()
    }
    return Choices(
        **settings,
        edit_offsets=np.zeros(num_choices + 1, np.int32),
        edit_ids=np.zeros(0, np.int32),
        edit_values=np.zeros((0, 3), np.float32),
    )


def greedy_choices(picks: NDArray[np.int32]) -> Choices:
    """Return choices of the likeliest token after each picked one, without log-probabilities or edits."""
    return dataclasses.replace(neutral_choices(len(picks)), picks=picks)


@dataclass(frozen=True, slots=True)
class Draw:
    """Result of each choice. Log-probabilities are natural, of the model's own distribution before any edit.

    token_ids [K] int64: the forced or sampled token; NOT_FINITE where the logits are not finite, NONE_ALLOWED where
        the edits forbid every token.
    logprobs [K] float32: of these tokens; 0 where none was requested, or where there is no token.
    top_ids [K, k] int64: the candidates whose edited values are largest, largest first, lowest id among equals; -1
        beyond the number that a choice requested, and where a token is forbidden.
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


def choose(logits: NDArray[np.float32], choices: Choices, positions: NDArray[np.int32]) -> Draw:
    """Make every choice in NumPy, as the native operator does.

    logits: [K, V] float32, the model's own after each picked token, not changed; -inf forbids a token
    positions: [K] int32 of the picked tokens: the counters of the random numbers
    A forced token is scored and not checked: it is returned even where the edits forbid every token.
    """
    rows = np.arange(len(choices))
    likeliest = logits.argmax(axis=1)
    is_finite = np.isfinite(logits[rows, likeliest])
    width = max(0, int(choices.num_logprobs.max(initial=0)))
    draw = Draw(
        np.where(is_finite, likeliest, NOT_FINITE),
        np.zeros(len(rows), np.float32),
        np.full((len(rows), width), -1, np.int64),
        np.zeros((len(rows), width), np.float32),
        np.full((len(rows), width), -np.inf, np.float32),
    )
    for row in np.flatnonzero(is_finite & _is_more_than_argmax(choices)).tolist():
        _choose_one(logits[row], choices, row, int(positions[row]), draw)
    return draw


def _is_more_than_argmax(choices: Choices) -> NDArray[np.bool_]:
    """Return [K]: True for choices that need more than the largest logit."""
    has_edits = choices.edit_offsets[1:] > choices.edit_offsets[:-1]
    is_edited = has_edits | (choices.is_exclusive != 0) | (choices.is_normalized != 0)
    is_asked = (choices.temperatures > 0) | (choices.given_ids >= 0) | (choices.num_logprobs >= 0)
    return np.asarray(is_edited | is_asked)


def _choose_one(logits: NDArray[np.float32], choices: Choices, row: int, position: int, draw: Draw) -> None:
    """Make one choice from logits [V], of which the largest is finite, and write it to its row of the draw."""
    wanted, is_normalized = int(choices.num_logprobs[row]), bool(choices.is_normalized[row])
    log_sum = _log_sum(logits) if wanted >= 0 or is_normalized else np.float64(0)
    values = _edited((logits - log_sum).astype(np.float32) if is_normalized else logits, choices, row)
    token_id = _token(values, choices, row, position)
    draw.token_ids[row] = token_id
    if wanted >= 0 and token_id >= 0:
        draw.logprobs[row] = logits[token_id] - log_sum
    if wanted > 0:
        top_ids = ids_of_largest(values, wanted)
        top_ids = top_ids[np.argsort(-values[top_ids], kind="stable")]
        top_ids = top_ids[values[top_ids] > -np.inf]
        held = slice(len(top_ids))
        draw.top_ids[row, held] = top_ids
        draw.top_logprobs[row, held] = logits[top_ids] - log_sum
        draw.top_scores[row, held] = values[top_ids] - (0.0 if is_normalized else log_sum)


def _token(values: NDArray[np.float32], choices: Choices, row: int, position: int) -> int:
    """Return the token that a choice takes from its edited values [V], or NONE_ALLOWED."""
    if choices.given_ids[row] >= 0:
        return int(choices.given_ids[row])
    likeliest = int(values.argmax())
    if values[likeliest] == -np.inf:
        return NONE_ALLOWED
    if choices.temperatures[row] == 0:
        return likeliest
    warp = Warp(
        temperature=float(choices.temperatures[row]),
        top_k=int(choices.top_ks[row]),
        top_p=float(choices.top_ps[row]),
        min_p=float(choices.min_ps[row]),
        typical_p=float(choices.typical_ps[row]),
    )
    return draw_from(values, warp, uniform_at(int(choices.seeds[row]), position))


def _edited(values: NDArray[np.float32], choices: Choices, row: int) -> NDArray[np.float32]:
    """Return values [V] after a choice's edits: the same array where it has none, and a copy otherwise."""
    edits = slice(int(choices.edit_offsets[row]), int(choices.edit_offsets[row + 1]))
    ids, is_exclusive = choices.edit_ids[edits], bool(choices.is_exclusive[row])
    if not len(ids) and not is_exclusive:
        return values
    result = np.full_like(values, -np.inf) if is_exclusive else values.copy()
    result[ids] = values[ids]
    edit_values = choices.edit_values[edits]
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
