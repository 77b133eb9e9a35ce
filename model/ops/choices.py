"""How next tokens are chosen from logits: the settings of each choice, and what comes of it. Torch-free.

The order of the steps is transformers': edits (bias, penalties, constraints), temperature, top-k, top-p, min-p,
typical-p, one draw. A choice depends on its own logits, settings, seed and position, and on no neighbour: the random
number comes from a counter, not from a stream that others advance. Ties go to the lowest id.

Axes: K choices, E edits, V vocabulary, k candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NOT_FINITE = -1
NONE_ALLOWED = -2


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """How the next token is chosen, K times over: each choice looks at the logits after one new token of a step.

    picks [K] int32: which of the step's new tokens, by index.
    temperatures [K] float32: 0 is greedy. top_ks [K] int32: 0 is off. top_ps, min_ps, typical_ps [K] float32: 1, 0 and
        1 are off. They act in this order, each on what the one before left, as transformers' warpers do.
    seeds [K] uint64: key of the random number; the counter is the position of the picked token.
    given_ids [K] int64: the token that stands there anyway, to be judged and not chosen; -1 is none.
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


@dataclass(frozen=True, slots=True)
class Draw:
    """What each choice came to; log-probabilities are natural, of the model's own distribution before any control.

    token_ids [K] int64: the token given, or chosen: NOT_FINITE where the logits are not numbers, NONE_ALLOWED where
        the edits forbid every token.
    logprobs [K] float32: of these tokens; 0 where not asked, or where there is none.
    top_ids [K, k] int64: the candidates whose edited values are largest, largest first, lowest id among equals; -1
        beyond what a choice asked for, and where a token is forbidden.
    top_logprobs [K, k] float32: of the candidates. top_scores [K, k] float32: their edited values, less the logarithm
        of the sum of the model's exp(logit): the log-probability where nothing is edited, -inf where there is none.
    Valid until the next decode.
    """

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float32]
    top_scores: NDArray[np.float32]
