"""The last operator of a decoder step: it samples the next tokens from hidden states and never returns logits.

The inputs after `positions` are the fields of `Choices`, the outputs are those of `Draw` (choices.py), in their order.
A choice depends on its own hidden state, settings, seed and position only.

Axes: N packed tokens; K choices, E edits, M model width, V vocabulary, k candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from antiphon.model.ops.choices import Choices, choose
from antiphon.model.ops.operator import Input, Operator, Output, PackedWeight, Shape
from antiphon.model.ops.operators import packed_weights
from antiphon.model.ops.torch_registration import register

SETTINGS = (
    Input("picks", "int32", "K", "the new token that each choice follows, by index"),
    Input("temperatures", "float", "K", "0 takes the likeliest token"),
    Input("top_ks", "int32", "K", "0 is off"),
    Input("top_ps", "float", "K", "1 is off"),
    Input("min_ps", "float", "K", "0 is off"),
    Input("typical_ps", "float", "K", "1 is off"),
    Input("seeds", "int64", "K", "keys of the random numbers: uint64 of the same bits"),
    Input("given_ids", "int64", "K", "forced token ids; -1 is none"),
    Input("num_logprobs", "int32", "K", "-1: no log-probabilities; 0: of the token; k: of k candidates too"),
    Input("is_normalized", "int32", "K", "1 edits log-probabilities, 0 logits"),
    Input("is_exclusive", "int32", "K", "1 forbids every token that has no edit"),
    Input("edit_offsets", "int32", "K + 1", "choice i has the edits edit_offsets[i] to edit_offsets[i + 1] - 1"),
    Input("edit_ids", "int32", "E", "token of each edit"),
    Input("edit_values", "float", "E, 3", "bias, penalty and shift of each edit"),
)

OUTPUTS = (
    Output("token_ids", "int64", "K", "tokens; -1 where logits are not finite, -2 where every token is forbidden"),
    Output("logprobs", "float", "K", "their log-probabilities"),
    Output("top_ids", "int64", "K, k", "candidates, likeliest first; -1 beyond the last"),
    Output("top_logprobs", "float", "K, k", "log-probabilities of the candidates"),
    Output("top_scores", "float", "K, k", "log-probabilities of the candidates after the edits"),
)


def _shapes(given: Mapping[str, Any]) -> Sequence[Shape]:
    """Return the shapes of the outputs; k is in the data: the largest of num_logprobs, at least 0."""
    count, candidates = given["seeds"].shape[0], torch.library.get_ctx().new_dynamic_size()
    return [(count,), (count,), *[(count, candidates)] * 3]


SELECT = Operator(
    name="select",
    purpose="Sample K tokens, each from the logits hidden weight^T + bias of one new token.",
    inputs=(
        Input("hidden", "float", "N, M", "states of the new tokens"),
        Input("weight", "float", "V, M", "the product over the vocabulary"),
        Input("positions", "int32", "N", "positions of the new tokens, counters of the random numbers"),
        *SETTINGS,
        Input("bias", "float", "V", "added to the logits", optional=True),
    ),
    outputs=OUTPUTS,
    shapes=_shapes,
    weight=PackedWeight(sizes=("vocab",), parts={"float32": packed_weights.FLOAT32, "int8": packed_weights.INT8}),
)


@register(SELECT)
def select(hidden: Tensor, weight: Tensor, positions: Tensor, *settings_and_bias: Tensor | None) -> tuple[Tensor, ...]:
    """Compute the logits and choose as `choose` of choices.py does."""
    *settings, bias = settings_and_bias
    held = zip(SETTINGS, settings, strict=True)
    choices = Choices(**{declared.name: tensor.numpy() for declared, tensor in held if tensor is not None})
    picked = choices.picks.astype(np.int64)
    logits = functional.linear(hidden[picked], weight, bias)
    draw = choose(logits.numpy(), choices, positions.numpy()[picked])
    return tuple(torch.from_numpy(getattr(draw, output.name)) for output in OUTPUTS)
