"""One layer of self-attention and one of an LSTM over the same states, and what they take by length.

Vaswani et al. 2017, table 1: operations, operations that must follow each other, and length of the path between two
positions; and time and memory of a forward and backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from antiphon.architecture.config import preset
from antiphon.lab.measures.autograd_paths import longest_chain, shortest_path
from antiphon.lab.memory.measurement import allocated_peak
from antiphon.lab.times import median_seconds
from antiphon.ops.attention import Backend
from antiphon.transformer.layers import SelfAttention

WIDTH = 128
Layer = Callable[[Tensor], Tensor]
"""Maps states [1, T, M] to states [1, T, M]."""


def attention_layer(backend: Backend = "eager") -> Layer:
    """Return self-attention of width WIDTH with 4 heads and random weights."""
    module = SelfAttention(preset("tiny", d_model=WIDTH, num_heads=4), 4, causal=False, backend=backend)
    return lambda states: module(states, torch.arange(states.shape[1])[None], None, None)


def recurrent_layer() -> Layer:
    """Return an LSTM of width WIDTH as PyTorch computes it."""
    module = nn.LSTM(WIDTH, WIDTH, batch_first=True)
    return lambda states: module(states)[0]


def stepwise_layer() -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return an LSTM of width WIDTH as a loop over tokens [1, M], so that each step has operations of its own."""
    cell = nn.LSTMCell(WIDTH, WIDTH)

    def run(tokens: Sequence[Tensor]) -> list[Tensor]:
        hidden = memory = torch.zeros(1, WIDTH)
        outputs = []
        for token in tokens:
            hidden, memory = cell(token, (hidden, memory))
            outputs.append(hidden)
        return outputs

    return run


LAYERS: Mapping[str, Callable[[], Layer]] = {
    "attention, eager": attention_layer,
    "attention, sdpa": partial(attention_layer, "sdpa"),
    "LSTM": recurrent_layer,
}


def _sdpa_operations(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object) -> int:
    found: int = sdpa_flop_count(query, key, value)  # type: ignore[no-untyped-call]
    return found


# The counter knows PyTorch's fused kernels for GPUs only, and counts those that it does not know as 0.
_FUSED_KERNELS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_operations}


def operations(name: str, length: int) -> int:
    """Return the floating-point operations of matrix products in a forward pass of a layer over `length` states."""
    states = torch.randn(1, length, WIDTH)
    with FlopCounterMode(display=False, custom_mapping=_FUSED_KERNELS) as counter, torch.no_grad():
        # The counter does not know PyTorch's LSTM operator, so the loop is counted in its place.
        stepwise_layer()(states.unbind(1)) if name == "LSTM" else LAYERS[name]()(states)
    return int(counter.get_total_flops())


def paths(name: str, length: int) -> tuple[int, int]:
    """Return the longest chain of operations, and the shortest path from the first input to the last output."""
    tokens = [torch.randn(1, WIDTH, requires_grad=True) for _ in range(length)]
    last = stepwise_layer()(tokens)[-1] if name == "LSTM" else LAYERS[name]()(torch.stack(tokens, dim=1))[:, -1]
    return longest_chain(last.sum()), shortest_path(last.sum(), tokens[0])


def step_of(layer: Layer, length: int) -> Callable[[], None]:
    """Return a forward and backward pass over `length` random states."""
    states = torch.randn(1, length, WIDTH, requires_grad=True)
    return lambda: layer(states).sum().backward()  # type: ignore[no-untyped-call]


def peak_bytes(layer: Layer, length: int) -> int:
    """Return the peak of allocated bytes of one forward and backward pass, beside the states themselves."""
    return allocated_peak(step_of(layer, length))


def costs(length: int, num_runs: int) -> dict[str, float]:
    """Return Mflop, MB and the median of ms of every layer, named "LAYER, UNIT"."""
    found: dict[str, float] = {}
    made = {name: make() for name, make in LAYERS.items()}
    for name, layer in made.items():
        found[f"{name}, Mflop"] = operations(name, length) / 1e6
        found[f"{name}, MB"] = peak_bytes(layer, length) / 1e6
    times = median_seconds({name: step_of(layer, length) for name, layer in made.items()}, num_runs)
    return found | {f"{name}, ms": 1e3 * seconds for name, seconds in times.items()}


def distances(length: int) -> dict[str, float]:
    """Return the results of `paths` for both kinds, named "LAYER, in sequence" and "LAYER, first to last"."""
    found: dict[str, float] = {}
    for name, layer in (("attention", "attention, eager"), ("LSTM", "LSTM")):
        found[f"{name}, in sequence"], found[f"{name}, first to last"] = paths(layer, length)
    return found
