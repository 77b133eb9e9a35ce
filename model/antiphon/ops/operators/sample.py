"""The last operator of a decoder step: it samples the next tokens from hidden states and never returns logits.

The inputs after `positions` are the fields of `SamplingArrays`, the outputs are those of `Samples` (sampling.py), in
their order. A sample depends on its own hidden state, parameters, seed and position only. The widths of float_params
and int_params are free, so that a graph also accepts parameters that were added after its export.

Axes: N packed tokens; K samples, F and I float and integer parameters, E edits, M model width, V vocabulary, k
candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from antiphon.ops.attention import capped
from antiphon.ops.operator import Attribute, Input, Operator, PackedWeight, Shape, register
from antiphon.ops.sampling import FLOAT_PARAMS, INT_PARAMS, SamplingArrays
from antiphon.ops.sampling import sample as sample_in_numpy
from antiphon.ops.shared_inputs import EDITS, FLOAT32_WEIGHT, INT8_WEIGHT, SAMPLES

PARAMS = (
    Input("picks", "int32", "K", "the new token that each sample follows, by index"),
    Input("float_params", "float", "K, F", "of each sample: " + ", ".join(FLOAT_PARAMS)),
    Input("int_params", "int64", "K, I", "of each sample: " + ", ".join(INT_PARAMS)),
    *EDITS,
)


def _shapes(inputs: Mapping[str, Any]) -> Sequence[Shape]:
    """Return the shapes of the outputs; k is in the data: the largest of num_logprobs, at least 0."""
    count, candidates = inputs["picks"].shape[0], torch.library.get_ctx().new_dynamic_size()
    return [(count,), (count,), *[(count, candidates)] * 3]


SAMPLE = Operator(
    name="sample",
    purpose="Sample K tokens, each from the logits hidden weight^T + bias of one new token.",
    inputs=(
        Input("hidden", "float", "N, M", "states of the new tokens"),
        Input("weight", "float", "V, M", "the product over the vocabulary"),
        Input("positions", "int32", "N", "positions of the new tokens, counters of the random numbers"),
        *PARAMS,
        Input("bias", "float", "V", "added to the logits", optional=True),
    ),
    attributes=(Attribute("cap", float, "limit of the logits: cap tanh(logit / cap); 0: none", default=0.0),),
    outputs=SAMPLES,
    shapes=_shapes,
    weights=(PackedWeight(sizes=("vocab",), parts={"float32": FLOAT32_WEIGHT, "int8": INT8_WEIGHT}),),
)


@register(SAMPLE)
def sample(
    hidden: Tensor, weight: Tensor, positions: Tensor, *params_and_bias: Tensor | None, cap: float = 0.0
) -> tuple[Tensor, ...]:
    """Compute the logits and sample as `sample` of sampling.py does."""
    *params, bias = params_and_bias
    arrays = zip(PARAMS, params, strict=True)
    sampling = SamplingArrays(**{declared.name: tensor.numpy() for declared, tensor in arrays if tensor is not None})
    picked = sampling.picks.astype(np.int64)
    logits = capped(functional.linear(hidden[picked], weight, bias), cap)
    samples = sample_in_numpy(logits.numpy(), sampling, positions.numpy()[picked])
    return tuple(torch.from_numpy(getattr(samples, output.name)) for output in SAMPLES)
