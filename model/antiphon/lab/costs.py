"""Costs by length: measured times and memory, and one layer of self-attention beside one of an LSTM.

Vaswani et al. 2017, table 1: operations, operations that must follow each other, and length of the path between two
positions; and time and memory of a forward and backward pass.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from antiphon.architecture.config import preset
from antiphon.ops.attention import Backend
from antiphon.transformer.layers import SelfAttention


def median_seconds(
    runs: Mapping[str, Callable[[], object]], num_runs: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the median seconds of each run by name, over `num_runs` rounds.

    A round calls every run once, so that a slow moment of the machine meets all of them. A first round is not counted,
    because first calls allocate memory and prepare kernels.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(num_runs):
        for name, run in runs.items():
            started_s = clock()
            run()
            times[name].append(clock() - started_s)
    return {name: statistics.median(values) for name, values in times.items()}


def allocated_peak(run: Callable[[], object]) -> int:
    """Return the largest number of bytes that `run` holds at once, beside what exists before it.

    The profiler reports every allocation of PyTorch's CPU allocator, freed ones too. Their running sum has an exact
    peak, which does not depend on other processes. It runs on one thread, because some kernels have a buffer for each.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    # Otherwise the profiler of torch 2.13 writes two lines to standard error each time.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            run()
    finally:
        torch.set_num_threads(threads)
    assert recorded.profiler is not None
    assert recorded.profiler.kineto_results is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def growth(points: Mapping[str, Mapping[str, Any]], figure: str) -> float:
    """Return the exponent p of the power law T^p that fits a figure best, over the longer half of the lengths T.

    points: figures by length. At small lengths constant costs hide the growth.
    """
    lengths = sorted(map(int, points))
    chosen = lengths[len(lengths) // 2 :] if len(lengths) > 3 else lengths
    values = [points[str(length)][figure] for length in chosen]
    return float(np.polyfit(np.log(chosen), np.log(values), 1)[0])


def crossing(points: Mapping[str, Mapping[str, Any]], rising: str, reference: str) -> float | None:
    """Return the first length at which `rising` passes `reference` from below; None if it never does.

    points: positive figures by length. Between two lengths both of them are taken as power laws.
    """
    lengths = sorted(map(int, points))
    gaps = [math.log(points[str(length)][rising] / points[str(length)][reference]) for length in lengths]
    for (start, below), (end, above) in pairwise(zip(lengths, gaps, strict=True)):
        if below <= 0 < above:
            return float(start * (end / start) ** (below / (below - above)))
    return None


def longest_chain(output: Tensor) -> int:
    """Return the number of operations on the longest path that ends in `output`: they cannot run at the same time.

    Operations of the graph that autograd records are counted, views included, so constants differ between models.
    """
    depth: dict[Any, int] = {}
    for node in _inputs_first(output.grad_fn):
        depth[node] = 1 + max((depth[child] for child in _children(node)), default=0)
    return depth[output.grad_fn]


def shortest_path(output: Tensor, leaf: Tensor) -> int:
    """Return the number of operations, counted as in `longest_chain`, on the shortest path from a leaf to `output`.

    Raises ValueError if the output does not depend on the leaf.
    """
    distance = {output.grad_fn: 0}
    queue = deque([output.grad_fn])
    while queue:
        node = queue.popleft()
        if getattr(node, "variable", None) is leaf:
            return distance[node]
        for child in _children(node):
            if child not in distance:
                distance[child] = distance[node] + 1
                queue.append(child)
    raise ValueError("output does not depend on the leaf")


def _children(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def _inputs_first(root: Any) -> list[Any]:
    """Return every node after the nodes whose results it uses; without recursion, because chains are long."""
    order: list[Any] = []
    is_done: dict[Any, bool] = {}
    stack = [root]
    while stack:
        node = stack[-1]
        if node not in is_done:
            is_done[node] = False
            stack += [child for child in _children(node) if child not in is_done]
        else:
            stack.pop()
            if not is_done[node]:
                is_done[node] = True
                order.append(node)
    return order


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


def _num_sdpa_operations(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object
) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


# The counter knows PyTorch's fused kernels for GPUs only, and counts those that it does not know as 0.
_FUSED_KERNELS = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _num_sdpa_operations}


def num_operations(name: str, length: int) -> int:
    """Return the floating-point operations of matrix products in a forward pass of a layer over `length` states."""
    states = torch.randn(1, length, WIDTH)
    with FlopCounterMode(display=False, custom_mapping=_FUSED_KERNELS) as counter, torch.no_grad():
        # The counter does not know PyTorch's LSTM operator, so the loop is counted in its place.
        stepwise_layer()(states.unbind(1)) if name == "LSTM" else LAYERS[name]()(states)
    return int(counter.get_total_flops())


def operation_paths(name: str, length: int) -> tuple[int, int]:
    """Return the longest chain of operations, and the shortest path from the first input to the last output."""
    tokens = [torch.randn(1, WIDTH, requires_grad=True) for _ in range(length)]
    last = stepwise_layer()(tokens)[-1] if name == "LSTM" else LAYERS[name]()(torch.stack(tokens, dim=1))[:, -1]
    return longest_chain(last.sum()), shortest_path(last.sum(), tokens[0])


def step_of(layer: Layer, length: int) -> Callable[[], None]:
    """Return a forward and backward pass over `length` random states."""
    states = torch.randn(1, length, WIDTH, requires_grad=True)
    return lambda: layer(states).sum().backward()  # type: ignore[no-untyped-call]


def layer_costs(length: int, num_runs: int) -> dict[str, float]:
    """Return Mflop, MB and the median of ms of every layer, named "LAYER, UNIT"."""
    figures: dict[str, float] = {}
    layers = {name: make() for name, make in LAYERS.items()}
    for name, layer in layers.items():
        figures[f"{name}, Mflop"] = num_operations(name, length) / 1e6
        figures[f"{name}, MB"] = allocated_peak(step_of(layer, length)) / 1e6
    times = median_seconds({name: step_of(layer, length) for name, layer in layers.items()}, num_runs)
    return figures | {f"{name}, ms": 1e3 * seconds for name, seconds in times.items()}


def layer_paths(length: int) -> dict[str, float]:
    """Return the results of `operation_paths` for both kinds, named "LAYER, in sequence" and "LAYER, first to last"."""
    figures: dict[str, float] = {}
    for name, layer in (("attention", "attention, eager"), ("LSTM", "LSTM")):
        figures[f"{name}, in sequence"], figures[f"{name}, first to last"] = operation_paths(layer, length)
    return figures
