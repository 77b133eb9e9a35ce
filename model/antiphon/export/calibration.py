"""Choice of the inputs of each product that integer graphs keep in float32: those with by far the largest activations.

A few inputs with activations far larger than the others' set the step of a row, and the others are rounded to a few
integers (Dettmers et al. 2022, LLM.int8, section 3). The model runs on a few texts, and every product's inputs are
measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from antiphon.bundle.manifest import Precision
from antiphon.export.quantize import quantize_groups, quantize_rows
from antiphon.export.weights import Outliers
from antiphon.transformer.greedy import greedy
from antiphon.transformer.transformer import Transformer

TEXTS = (
    "The weather was fine yesterday, so we walked along the river to the old mill.",
    "Could you please tell me when the next train to Berlin leaves?",
    "In 1969, three astronauts travelled to the Moon; two of them landed there on 20 July.",
    "The committee has published its report on energy prices, which rose by 4.5 % last year.",
    "She put the book back on the shelf, closed the window and went to bed.",
    "Water boils at 100 degrees Celsius at sea level, but at a lower temperature in the mountains.",
    "I do not think that this is a good idea, but we can try it if everybody agrees.",
)
_COUNTS = (4, 8, 16, 32)
_GAIN = 0.7  # more columns must lower the mean square of the error to this factor
_LEVELS = 127
_SMALL = 0.01  # of a row; normal numbers are off by 0.006 to 0.008
_MAX_LEN = 48  # tokens of a text
_NUM_RANDOM = 24


@torch.no_grad()
def find_outliers(model: Transformer, sources: Sequence[Sequence[int]] | None = None) -> Outliers:
    """Return the outliers of every product that runs over sources of token ids; None: over random ids."""
    if sources is None:
        random = np.random.default_rng(0)
        sources = random.integers(0, model.config.resolved_source_vocab_size, (len(TEXTS), _NUM_RANDOM)).tolist()
    rows: dict[int, list[Tensor]] = {}

    def record(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        states = inputs[0].reshape(-1, inputs[0].shape[-1])
        rows.setdefault(layer.get_parameter("weight").data_ptr(), []).append(states.abs())

    products = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [product.register_forward_pre_hook(record) for product in products]
    try:
        for source in sources:
            _run(model, source)
    finally:
        for hook in hooks:
            hook.remove()
    return {address: choose_columns(torch.cat(inputs).numpy()) for address, inputs in rows.items()}


def _run(model: Transformer, ids: Sequence[int]) -> None:
    source, target = answered(model, ids)
    if not source:
        return
    if model.encoder is None:
        model.logits(model.decode(torch.tensor([target]), None))
    elif model.decoder is None:
        model.encode(torch.tensor([source]))
    else:
        model(torch.tensor([source]), torch.tensor([target]))


def answered(model: Transformer, ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the source, cut to the model's limits, and its target: the begin token and the likeliest tokens.

    Of a model without an encoder or without a decoder, both are the source.
    """
    config = model.config
    limit = config.max_target_len if model.encoder is None else config.max_source_len
    source = list(ids[: min(_MAX_LEN, limit)])
    if model.encoder is None or model.decoder is None or not source:
        return source, source
    return source, [config.bos_id, *greedy(model, [source], min(_MAX_LEN, config.max_target_len) - 1)[0]]


def with_rounding(model: Transformer, precision: Precision, outliers: Outliers) -> Transformer:
    """Return a copy of a model with a decoder that rounds weights and activations as integer kernels do.

    It computes in float32. The output projection has no outliers, and stays int8 in int4 graphs, as embeddings do.
    """
    copy = deepcopy(model)
    weights: dict[int, Tensor] = {}
    for original, layer in zip(model.modules(), copy.modules(), strict=True):
        if not isinstance(original, nn.Linear | nn.Embedding):
            continue
        weight, address = original.weight.detach(), original.weight.data_ptr()
        columns: list[int] = []
        if isinstance(original, nn.Linear):
            if original is not model.output and address in outliers:
                columns = outliers[address].tolist()
            layer.register_forward_pre_hook(
                lambda _, inputs, columns=columns: (_with_rounded_rows(inputs[0], columns), *inputs[1:])
            )
        if address not in weights:
            array = weight.numpy()
            if precision == "int4" and isinstance(original, nn.Linear) and original is not model.output:
                weights[address] = torch.from_numpy(quantize_groups(array).weight())
            else:
                integers, scales = quantize_rows(array)
                weights[address] = torch.from_numpy(integers * scales[:, None])
            weights[address][:, columns] = weight[:, columns]
        layer.get_parameter("weight").data = weights[address]
    return copy


def _with_rounded_rows(x: Tensor, columns: Sequence[int]) -> Tensor:
    """Return x [..., K] with rounded rows; `columns` are exact and count as 0 for the others."""
    rest = x.clone()
    rest[..., columns] = 0
    low, high = rest.amin(-1, keepdim=True), rest.amax(-1, keepdim=True)
    largest = torch.maximum(high, -low)
    steps = torch.where(low < 0, largest / _LEVELS, high / (2 * _LEVELS + 1))
    numbers = (rest / steps.clamp(min=torch.finfo(x.dtype).tiny)).round() * steps
    numbers[..., columns] = x[..., columns]
    return numbers


def choose_columns(sizes: NDArray[np.float32]) -> NDArray[np.int32]:
    """Return the columns of activations whose exact product lowers the error enough, in rising order; often none.

    sizes: absolute values [N, K]. The error of a row is in proportion to its largest number that is rounded.
    """
    width = sizes.shape[1]
    order = np.argsort(-sizes.max(axis=0), kind="stable")
    norms = np.maximum(np.square(sizes).sum(axis=1), 1e-30)

    def error(count: int) -> float:
        return float((np.square(sizes[:, order[count:]].max(axis=1)) / norms).mean())

    best, lowest = 0, error(0)
    for count in _COUNTS:
        if count * 4 > width:
            break
        if lowest * width / 12 < (_LEVELS * _SMALL) ** 2:
            break
        if (found := error(count)) < _GAIN * lowest:
            best, lowest = count, found
    return np.sort(order[:best]).astype(np.int32)
