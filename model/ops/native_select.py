"""The operator that ends a decoder step: from hidden states to each row's next token, without an array of logits.

Registered with PyTorch as `antiphon::select`, with an eager reference and a shape rule. A row's token depends on its
own hidden state, settings, seed and position only.

Axes: N tokens of a run, packed; R rows, M model width, V vocabulary, k likeliest tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from antiphon.model.ops.counter_random import uniform_at

_SELECT = (
    "(Tensor hidden, Tensor weight, Tensor offsets, Tensor positions, Tensor temperatures, Tensor top_ks,"
    " Tensor top_ps, Tensor seeds, Tensor num_logprobs) -> (Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("antiphon::select", mutates_args=(), schema=_SELECT)
def select(
    hidden: Tensor,
    weight: Tensor,
    offsets: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    seeds: Tensor,
    num_logprobs: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Choose one token for each row, from the logits hidden weight^T of its last token.

    hidden [N, M] float32; weight [V, M]; offsets [R + 1] int32: row r's tokens are offsets[r] to offsets[r + 1];
    positions [N] int32; temperatures [R] float32 (0: the likeliest, ties to the lowest id); top_ks [R] int32 (0: off);
    top_ps [R] float32 (1: off; Holtzman et al. 2020, section 3.1, after top_k); seeds [R] int64, the bits of a uint64;
    num_logprobs [1] int32: -1 none, 0 of the chosen token, k of the k likeliest too.
    Returns token_ids [R] int64 (-1: the row's logits are not finite), logprobs [R] float32, natural logarithms before
    temperature (0 where not asked), top_ids [R, k] int64 and top_logprobs [R, k], likeliest first, ties by id.
    """
    last = offsets[1:].long() - 1
    logits = hidden[last] @ weight.T  # [R, V]
    finite = logits.max(dim=-1).values.isfinite()
    token_ids = torch.where(finite, logits.argmax(dim=-1), -1)
    for row in torch.nonzero(finite & (temperatures > 0)).flatten().tolist():
        ids, weights = distribution(logits[row].numpy(), float(temperatures[row]), int(top_ks[row]), float(top_ps[row]))
        uniform = uniform_at(int(seeds[row]), int(positions[last[row]]))
        token_ids[row] = int(ids[np.searchsorted(np.cumsum(weights), uniform * weights.sum(), side="right")])
    wanted = int(num_logprobs)
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.sort(dim=-1, descending=True, stable=True)
    chosen = logprobs.gather(1, token_ids.clamp(min=0)[:, None])[:, 0]
    count = max(wanted, 0)
    return (
        token_ids,
        chosen if wanted >= 0 else torch.zeros_like(chosen),
        top.indices[:, :count].clone(),
        top.values[:, :count].clone(),
    )


@select.register_fake
def _select_shape(
    hidden: Tensor,
    weight: Tensor,
    offsets: Tensor,
    positions: Tensor,
    temperatures: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    seeds: Tensor,
    num_logprobs: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, count = temperatures.shape[0], torch.library.get_ctx().new_dynamic_size()
    return (
        seeds.new_empty(rows),
        hidden.new_empty(rows),
        seeds.new_empty(rows, count),
        hidden.new_empty(rows, count),
    )


def distribution(
    logits: NDArray[np.float32], temperature: float, top_k: int, top_p: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids that may be drawn, rising, and their weights, proportional to probability.

    logits [V]. Temperature, then the top_k likeliest, then the fewest of these that hold top_p of their mass.
    """
    order = np.argsort(-logits, kind="stable")[: top_k or len(logits)]
    scaled = (logits[order].astype(np.float64) - float(logits.max())) / temperature
    weights = np.exp(scaled)
    if top_p < 1:
        count = int(np.searchsorted(np.cumsum(weights), top_p * weights.sum())) + 1
        order, weights = order[:count], weights[:count]
    rising = np.argsort(order)
    return order[rising], weights[rising]
