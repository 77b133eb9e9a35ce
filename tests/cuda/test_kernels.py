"""Every kernel in Triton's interpreter against the eager reference of its node.

Shapes and block tables are random, programs run in three orders, outputs and unused cache positions are NaN before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.ops.cuda import PADDING, PREVIOUS, TILE, references
from antiphon.ops.cuda.nodes import ACTIVATIONS, NODES
from tests.cuda import node_launches
from tests.cuda.interpreter import Grid

Arguments = dict[str, Any]

# Results are rounded once to their type; attention also rounds weights to it before the second product.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = tuple(TOLERANCE)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


class Draw:
    """Random arguments of one type."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype

    def states(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)

    def order(self, programs: list[Grid]) -> list[Grid]:
        return [programs[index] for index in torch.randperm(len(programs), generator=self.generator).tolist()]


def check(node: str, arguments: Arguments, draw: Draw) -> None:
    """Compare the kernel, its programs reversed and shuffled, with the reference."""
    arguments = _complete(node, arguments)
    expected = _tensors(getattr(references, node)(**arguments))
    launch: Callable[..., Any] = getattr(node_launches, node)
    for order in (reverse, draw.order):
        actual = _tensors(launch(**arguments, order=order))
        for ours, reference in zip(actual, expected, strict=True):
            close(ours, reference)


def reverse(programs: list[Grid]) -> list[Grid]:
    return programs[::-1]


def _complete(node: str, arguments: Arguments) -> Arguments:
    """Return the arguments with None for every absent optional input."""
    name = "Cuda" + "".join(word.capitalize() for word in node.split("_"))
    inputs = next(each for each in NODES if each.name == name).inputs
    return {given.name: None for given in inputs if given.optional} | arguments


def close(ours: Tensor, reference: Tensor) -> None:
    assert ours.dtype == reference.dtype
    tolerance = TOLERANCE.get(ours.dtype, 0.0)
    torch.testing.assert_close(ours, reference, atol=tolerance, rtol=tolerance)


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("width", [48, 1040])
@pytest.mark.parametrize("parts", ["all", "tokens only"])
def test_embed(dtype: torch.dtype, width: int, parts: str) -> None:
    draw = Draw(width, dtype)
    arguments: Arguments = {
        "tokens": draw.ints(0, 20, 6),
        "positions": torch.tensor([0, 3, PADDING, 5, 6, 2], dtype=torch.int32),
        "weight": draw.states(20, width),
        "scale": 1.5,
    }
    if parts == "all":
        arguments["tokens"][1] = PREVIOUS
        arguments |= {
            "position_table": draw.states(8, width),
            "rows": draw.ints(0, 3, 6),
            "previous": torch.tensor([4, 0, 19], dtype=torch.int32),
            "types": draw.ints(0, 2, 6),
            "type_table": draw.states(2, width),
        }
    check("embed", arguments, draw)


@pytest.mark.parametrize("width", [48, 1040])
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("parts", ["all", "x only"])
def test_add_norm(dtype: torch.dtype, width: int, kind: str, parts: str) -> None:
    draw = Draw(width, dtype)
    arguments: Arguments = {"x": draw.states(5, width) + 3, "epsilon": 1e-5, "kind": kind}
    if parts == "all":
        arguments |= {name: draw.states(width) for name in ("bias", "weight", "norm_bias")}
        arguments["residual"] = draw.states(5, width)
    check("add_norm", arguments, draw)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activate(dtype: torch.dtype, activation: str, gated: bool) -> None:
    draw, width = Draw(3, dtype), 1040
    full = width * (2 if gated else 1)
    arguments = {"x": 2 * draw.states(3, full), "bias": draw.states(full), "activation": activation, "gated": gated}
    check("activate", arguments, draw)
    check("activate", arguments | {"bias": None}, draw)


def test_rotary(dtype: torch.dtype) -> None:
    draw = Draw(4, dtype)
    heads, width = 2, 48
    arguments: Arguments = {
        "qkv": draw.states(5, 3 * heads * width),
        "bias": draw.states(3 * heads * width),
        "positions": torch.tensor([0, 9, PADDING, 1, 4], dtype=torch.int32),
        "table": draw.floats(10, width),
        "num_heads": heads,
    }
    check("rotary", arguments, draw)


@pytest.mark.parametrize(
    ("width", "bias", "causal"), [(16, "none", False), (48, "table", True), (80, "slopes", False), (256, "all", True)]
)
def test_packed_attention(dtype: torch.dtype, width: int, bias: str, causal: bool) -> None:
    if dtype == torch.float32:
        width = min(width, 128)  # a wider one would need more shared memory than some cards have
    draw, heads = Draw(width, dtype), 2
    lens = [1, TILE + 5, 17]
    offsets = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
    tiles = [(index, start) for index, length in enumerate(lens) for start in range(0, length, TILE)]
    arguments: Arguments = {
        "qkv": draw.states(sum(lens), 3 * heads * width),
        "bias": draw.states(3 * heads * width) if bias in ("table", "all") else None,
        "offsets": offsets,
        "tiles": torch.tensor([*tiles, (-1, 0)], dtype=torch.int32),
        "bias_table": draw.floats(heads, 2 * 9 + 1) if bias in ("table", "all") else None,
        "slopes": draw.floats(heads).abs() if bias in ("slopes", "all") else None,
        "num_heads": heads,
        "scale": width**-0.5,
        "causal": causal,
    }
    check("packed_attention", arguments, draw)


class Pool:
    """Cache of `rows` rows with up to 5 blocks each in random order; positions that nobody wrote are NaN."""

    layers, heads = 2, 2

    def __init__(self, draw: Draw, width: int, rows: int = 3) -> None:
        self.width = width
        blocks = torch.randperm(5 * rows + 2, generator=draw.generator)[: 5 * rows].to(torch.int32)
        self.tables = blocks.reshape(rows, 5)
        shape = (5 * rows + 2, self.layers, 2, self.heads, 16, width)
        self.cache = torch.full(shape, float("nan"), dtype=draw.dtype)

    def fill(self, draw: Draw, lengths: list[int]) -> None:
        """Write random keys and values of a row's first positions in layer 1."""
        for row, length in enumerate(lengths):
            for position in range(length):
                block = int(self.tables[row, position // 16])
                self.cache[block, 1, :, :, position % 16] = draw.states(2, self.heads, self.width)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("width", [16, 80, 256])
def test_paged_write(dtype: torch.dtype, width: int, parts: int) -> None:
    draw = Draw(width, dtype)
    pool = Pool(draw, width)
    arguments: Arguments = {
        "kv": draw.states(6, parts * pool.heads * width),
        "bias": draw.states(parts * pool.heads * width),
        "tables": pool.tables,
        "rows": torch.tensor([0, 0, 1, 2, 2, 2], dtype=torch.int32),
        "positions": torch.tensor([15, 16, 79, PADDING, 3, 4], dtype=torch.int32),
        "num_heads": pool.heads,
        "layer": 1,
    }
    expected = pool.cache.clone()
    written = references.paged_write(cache=expected, **arguments)
    tolerance = TOLERANCE[dtype] if dtype == torch.bfloat16 else 0  # the interpreter cuts bits off where a card rounds
    for order in (reverse, draw.order):
        cache = pool.cache.clone()
        assert torch.equal(node_launches.paged_write(cache=cache, **arguments, order=order), written)
        torch.testing.assert_close(cache, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(("width", "bias"), [(16, "none"), (48, "table"), (80, "slopes"), (256, "all")])
def test_paged_attention(dtype: torch.dtype, width: int, bias: str, num_splits: int) -> None:
    draw = Draw(width + num_splits, dtype)
    pool = Pool(draw, width)
    pool.fill(draw, [80, 1, 33])
    states = pool.heads * width
    arguments: Arguments = {
        "query": draw.states(5, 3 * states),
        "bias": draw.states(3 * states) if bias in ("table", "all") else None,
        "cache": pool.cache,
        "tables": pool.tables,
        "rows": torch.tensor([0, 0, 1, 2, 0], dtype=torch.int32),
        "lengths": torch.tensor([80, 64, 1, 33, 0], dtype=torch.int32),
        "bias_table": draw.floats(pool.heads, 2 * 9 + 1) if bias in ("table", "all") else None,
        "slopes": draw.floats(pool.heads).abs() if bias in ("slopes", "all") else None,
        "num_heads": pool.heads,
        "scale": width**-0.5,
        "layer": 1,
    }
    arguments = _complete("paged_attention", arguments)
    expected = references.paged_attention(**arguments)
    for order in (reverse, draw.order):
        close(node_launches.paged_attention(**arguments, num_splits=num_splits, order=order), expected)


@pytest.mark.parametrize("width", [48, 1040])
def test_pick(dtype: torch.dtype, width: int) -> None:
    draw = Draw(1, dtype)
    check("pick", {"hidden": draw.states(5, width), "picks": torch.tensor([4, 0, 0], dtype=torch.int32)}, draw)
