"""The operator that ends a decoder step: from hidden states to the tokens that follow them, without an array of logits.

Registered with PyTorch as `antiphon::select`, with an eager reference, which chooses as choices.py does, and a shape
rule. A choice depends on its own hidden state, settings, seed and position only.

Axes: N tokens of a run, packed; K choices, E edits, M model width, V vocabulary, k candidates.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from antiphon.model.ops.choices import Choices, Draw, choose

SETTINGS = tuple(field.name for field in fields(Choices))
DRAWN = tuple(field.name for field in fields(Draw))

_OPERANDS = ("Tensor hidden", "Tensor weight", "Tensor? bias", "Tensor positions", *(f"Tensor {s}" for s in SETTINGS))
_SELECT = f"({', '.join(_OPERANDS)}) -> ({', '.join(['Tensor'] * len(DRAWN))})"


@torch.library.custom_op("antiphon::select", mutates_args=(), schema=_SELECT)
def select(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, *settings: Tensor
) -> tuple[Tensor, ...]:
    """Make K choices, each from the logits hidden weight^T + bias of the token it picks.

    hidden [N, M] float32; weight [V, M]; bias [V] or None; positions [N] int32; settings: the fields of `Choices`, in
    their order, the seeds as int64 of the same bits.
    Returns the fields of `Draw`, in their order; k is the largest of num_logprobs, at least 0.
    """
    choices = Choices(**dict(zip(SETTINGS, (tensor.numpy() for tensor in settings), strict=True)))
    picked = choices.picks.astype(np.int64)
    logits = functional.linear(hidden[picked], weight, bias)
    draw = choose(logits.numpy(), choices, positions.numpy()[picked])
    return tuple(torch.from_numpy(getattr(draw, name)) for name in DRAWN)


@select.register_fake
def _select_shape(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, *settings: Tensor
) -> tuple[Tensor, ...]:
    seeds = settings[SETTINGS.index("seeds")]
    count, width = seeds.shape[0], torch.library.get_ctx().new_dynamic_size()
    return (
        seeds.new_empty(count),
        hidden.new_empty(count),
        seeds.new_empty(count, width),
        hidden.new_empty(count, width),
        hidden.new_empty(count, width),
    )
