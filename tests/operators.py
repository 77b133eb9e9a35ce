"""Valid calls of every operator, made from its declaration: the inputs by name, None for an absent one, and attributes.

The declaration gives the order, types and axes of the inputs. `Inputs` adds the values of integers, which are ids,
positions, offsets and block tables, and of sampling parameters. A new operator needs no entry here, unless it has an
integer input of a new name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from antiphon.export.weights import pack_float, pack_int4, pack_int8
from antiphon.ops.activations import ACTIVATIONS
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for, padded_width
from antiphon.ops.operator import NODE_PREFIXES, Input, Node, Operator
from antiphon.ops.operators import OPERATORS
from antiphon.ops.operators.attention import write_position
from antiphon.ops.operators.linear import LINEAR
from antiphon.ops.operators.recurrence import row_states
from antiphon.ops.sampling import FLOAT_PARAMS, INT_PARAMS

Rng = np.random.Generator
Array = NDArray[Any]
Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Arrays = dict[str, Array | None]
Call = tuple[Arrays, dict[str, Any]]

LOWEST, HIGHEST = -(2**31), 2**31 - 1
NUM_LAYERS = 2
# Every node of the native library: its operator, and the precision of its weights.
NODES: dict[str, tuple[Operator, str]] = {
    node.name: (operator, precision)
    for operator in OPERATORS
    for precision in (NODE_PREFIXES if operator.weights else ["float32"])
    if (node := operator.packed_node(precision) if operator.weights else operator.node()) is not None
}
SUBLAYERS = [operator.node_name for operator in OPERATORS if operator.name.endswith("_sublayer")]
# Attributes say little about sizes, so few of them serve many calls with one session.
_OUTPUTS = [1, 16, 40, 257]
_HEADS = [(1, 8), (2, 10), (2, 16), (3, 24), (4, 32), (2, 64), (1, 70), (1, 128)]
_FLOAT_PARAMS = {
    "temperature": [0, 0, 1e-45, 0.3, 1, 3e38, np.inf],
    "top_p": [0, 1e-30, 0.5, 0.95, 1, 7, np.inf],
    "min_p": [0, 0, 1e-30, 0.1, 1],
    "typical_p": [0, 1e-30, 0.2, 0.95, 1, 1, np.inf],
}


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng([*shape, seed]).standard_normal(shape, np.float32)


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def ramp(counts: Sequence[int]) -> Ints:
    """Return offsets of sequences of these lengths."""
    return ints(0, *np.cumsum(counts, dtype=np.int32).tolist())


def pick(rng: Rng, choices: Sequence[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def packed_weight(weight: Floats, precision: str, prefix: str = "") -> Arrays:
    """Return the inputs of a node in place of a weight [O, K]. One without inputs is a slice of one with one input."""
    (declared,) = LINEAR.weights
    padded = weight if weight.shape[1] else np.ones((len(weight), 1), np.float32)
    parts = (pack_float(padded),) if precision == "float32" else astuple(_PACKERS[precision](padded))
    if not weight.shape[1]:
        parts = tuple(np.ascontiguousarray(part[:, :0]) if part.ndim > 1 else part for part in parts)
    return {prefix + port.name: part for port, part in zip(declared.inputs(precision), parts, strict=True)}


_PACKERS: dict[str, Any] = {"int8": pack_int8, "int4": pack_int4}


def block_tables(lens: Sequence[int], rng: Rng, *, spare: int = 1, unused: int = -7) -> tuple[Ints, int]:
    """Return tables of shuffled blocks for sequences of these lengths, and the number of blocks.

    spare: number of blocks, and of entries of each table, that no sequence uses.
    """
    counts = [blocks_for(length) for length in lens]
    order = rng.permutation(sum(counts) + spare)
    tables = np.full((len(lens), max(counts, default=0) + spare), unused, np.int32)
    for row, blocks in zip(tables, np.split(order, np.cumsum(counts)), strict=False):
        row[: len(blocks)] = blocks
    return tables, len(order)


class Pool:
    """Pool filled with NaN, and block tables for sequences of these lengths; unused entries are out of range.

    spare_heads: heads of the pool behind those of the layers.
    """

    def __init__(
        self, lens: Sequence[int], heads: int, width: int, dtype: str, *, layers: int = 2, spare_heads: int = 0
    ) -> None:
        self.tables, count = block_tables(lens, np.random.default_rng(len(lens)))
        shape = (count, layers, 2, heads + spare_heads, BLOCK_SIZE * padded_width(width))
        self.cache = np.full(shape, np.nan, dtype)
        self._heads, self._width = heads, width

    def hold(self, layer: int, lens: Sequence[int], seed: int = 5) -> None:
        """Write random keys and values at the first positions of every sequence."""
        random = np.random.default_rng(seed)
        for table, length in zip(self.tables.tolist(), lens, strict=True):
            for position in range(length):
                pair = random.standard_normal((2, self._heads, self._width), np.float32)
                key, value = torch.from_numpy(pair)
                write_position(torch.from_numpy(self.cache), layer, table, position, key, value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of a call.

    tokens: N, unless they are those of the sequences. width: M or K. outputs: O and V; F is the next even number.
    lens: of each sequence or row, in tokens; new: tokens of each row that are not in the cache yet.
    positions: P. edits: number of logits processors of each sample.
    optional: probability of each optional input. spare: number of unused blocks, entries of tables, heads and edits.
    unused: value of unused entries of tables.
    """

    tokens: int = 3
    width: int = 8
    outputs: int = 20
    heads: int = 2
    head_width: int = 8
    lens: Sequence[int] = (2, 3)
    new: Sequence[int] = (1, 1)
    positions: int = 4
    reach: int = 2
    edits: Sequence[int] = (2, 0)
    optional: float = 1.0
    spare: int = 0
    unused: int = -7
    gated: bool = True
    cache: str = "float32"


def small_call(name: str) -> Call:
    """Return a call of a node with few tokens and every optional input; paged rows have 20 and 5 tokens."""
    operator, precision = NODES[name]
    return packed(operator, call(operator, small_sizes(operator), np.random.default_rng(0)), precision)


def small_sizes(operator: Operator) -> Sizes:
    is_paged = any(port.name == "cache" for port in operator.inputs)
    return Sizes(lens=(20, 5), spare=1) if is_paged else Sizes()


def random_call(name: str, rng: Rng) -> Call:
    """Return a call of a node with sizes around the tile sizes of the kernels, or empty."""
    operator, precision = NODES[name]
    return packed(operator, call(operator, random_sizes(operator, rng), rng), precision)


def random_sizes(operator: Operator, rng: Rng) -> Sizes:
    heads, head_width = pick(rng, _HEADS)
    new = [int(rng.integers(0, 21)) for _ in range(int(rng.integers(0, 6)))]
    lens = [any_size(rng, 200) for _ in new]
    if _has_rows(operator):
        lens = [max(1, past + count) for past, count in zip(lens, new, strict=True)]
    # A width that is an attribute, or that of a whole layer, is one of few.
    width = any_size(rng) if operator.name in ("linear", "add_norm", "sample") else pick(rng, [16, 40, 70])
    tokens = any_size(rng, 200)
    num_samples = pick(rng, [tokens, any_size(rng, 40) * bool(tokens)])
    return Sizes(
        tokens=tokens,
        width=width,
        outputs=pick(rng, [*_OUTPUTS, 700] if operator.name == "sample" else _OUTPUTS),
        heads=heads,
        head_width=head_width,
        lens=lens,
        new=new,
        positions=pick(rng, [1, 30, 400]),
        reach=int(rng.integers(0, 200)),
        edits=[int(rng.integers(0, pick(rng, [1, 2, 20]))) for _ in range(num_samples)],
        optional=0.5,
        spare=pick(rng, [0, 1]),
        unused=pick(rng, [LOWEST, -1, HIGHEST]),
        gated=pick(rng, [False, True]),
        cache=pick(rng, ["float32", "float16"]),
    )


def any_size(rng: Rng, most: int = 130) -> int:
    """Return a size from 0 to `most`: mostly small or next to a multiple of 16."""
    kind = rng.random()
    if kind < 0.1:
        return 0
    if kind < 0.4:
        return int(rng.integers(1, 6))
    if kind < 0.9:
        return min(most, 16 * int(rng.integers(1, 6)) + int(rng.integers(-1, 2)))
    return int(rng.integers(most // 2, most + 1))


def call(operator: Operator, sizes: Sizes, rng: Rng) -> Call:
    """Return a call of an operator as PyTorch makes it, with weights [O, K]; these keep products near 1."""
    inputs, weights = Inputs(operator.node(), sizes, rng), [weight.name for weight in operator.weights]
    arrays = {port.name: inputs.array(port) for port in operator.inputs}
    for name in weights:
        weight = arrays[name]
        assert weight is not None
        arrays[name] = weight * np.float32(max(1, weight.shape[1]) ** -0.5)
    return arrays, {attribute.name: inputs.attribute(attribute.name) for attribute in operator.attributes}


def packed(operator: Operator, unpacked: Call, precision: str) -> Call:
    """Return the call of the operator's node at a precision."""
    weights, attributes = {weight.name: weight for weight in operator.weights}, dict(unpacked[1])
    arrays: Arrays = {}
    for name, array in unpacked[0].items():
        if name not in weights:
            arrays[name] = array
            continue
        assert array is not None
        parts = packed_weight(array, precision, name.removesuffix("weight"))
        arrays |= {part.name: parts[part.name] for part in weights[name].inputs(precision)}
        attributes |= zip(weights[name].sizes, array.shape, strict=False)
    for weight in weights.values():
        for port in weight.outlier_inputs(precision):
            arrays[port.name] = None
    return arrays, attributes


def _has_rows(operator: Operator | Node) -> bool:
    """Return whether its tokens are the new ones of rows that have more in the cache."""
    return any(port.axes == "R + 1" for port in operator.inputs)


class Inputs:
    """Arrays of one call: a method for each input whose values have a meaning; others are random floats."""

    def __init__(self, node: Node, sizes: Sizes, rng: Rng) -> None:
        self.sizes, self.rng = sizes, rng
        self.has_rows = _has_rows(node)
        names = {port.name for port in node.inputs}
        self.counts = sizes.new if self.has_rows else sizes.lens
        self.num_tokens = sum(self.counts) if "offsets" in names else sizes.tokens
        self.has_states = "cache" in names and all(attribute.name != "num_heads" for attribute in node.attributes)
        self.is_sampling, self.reads_sources = "edit_offsets" in names, "source_lens" in names
        self.tables_of_rows, self.num_blocks = block_tables(sizes.lens, rng, spare=sizes.spare, unused=sizes.unused)
        inner = sizes.outputs + sizes.outputs % 2
        self.axes = {
            "N": self.num_tokens, "M": sizes.width, "K": sizes.width, "O": sizes.outputs, "V": sizes.outputs,
            "F": inner, "G": inner // 2 if sizes.gated else inner, "H": sizes.heads, "D": sizes.head_width,
            "P": max(sizes.lens, default=0) if self.has_rows else sizes.positions,
            "2 * reach + 1": 2 * sizes.reach + 1,
        }  # fmt: skip

    def array(self, port: Input) -> Array | None:
        """Return an input, or None for an optional one; positions are needed with a rotary table."""
        if port.optional and port.name != "positions" and self.rng.random() >= self.sizes.optional:
            return None
        if make := getattr(self, port.name, None):
            found: Array = make()
            return found
        assert port.kind in ("float", "float32"), f"tests/operators.py: no values for {port.name}"
        return self.floats(*(self.size(axis) for axis in port.axes.split(", ")))

    def size(self, axis: str) -> int:
        """Return the size of an axis; a product of letters is the product of their sizes."""
        if axis in self.axes:
            return self.axes[axis]
        return math.prod(self.axes[word] if word in self.axes else int(word) for word in axis.split())

    def floats(self, *shape: int) -> Floats:
        return self.rng.standard_normal(shape, np.float32)

    def below(self, limit: int, count: int) -> Ints:
        return self.rng.integers(0, max(limit, 1), count, np.int32)

    def chosen(self, values: Sequence[float], count: int) -> Floats:
        return self.rng.choice(np.array(values, np.float32), count)

    def attribute(self, name: str) -> Any:
        choices: dict[str, list[Any]] = {
            "num_heads": [self.sizes.heads], "scale": [0.3], "epsilon": [1e-5], "gated": [self.sizes.gated],
            "causal": [False, True], "cap": [0.0, 0.7], "kind": ["layer", "rms"], "activation": [*ACTIVATIONS],
            "layer": list(range(NUM_LAYERS)),
        }  # fmt: skip
        return pick(self.rng, choices[name])

    def input_ids(self) -> Array:
        return self.below(self.sizes.outputs, self.num_tokens).astype(np.int64)

    def positions(self) -> Ints:
        if self.has_rows:
            rows = zip(self.sizes.lens, self.sizes.new, strict=True)
            return np.concatenate([ints(), *(np.arange(length - new, length, dtype=np.int32) for length, new in rows)])
        if self.is_sampling:
            return self.rng.integers(LOWEST, HIGHEST, self.num_tokens, np.int32)
        return self.below(self.sizes.positions, self.num_tokens)

    def offsets(self) -> Ints:
        return ramp(self.counts)

    def position_rows(self) -> Ints:
        return np.sort(self.below(self.sizes.positions, 2 * self.sizes.reach + 1))

    def slopes(self) -> Floats:
        return np.abs(self.floats(self.sizes.heads))

    def cache(self) -> Array:
        """Return a pool with keys and values, or states, of earlier tokens; no operator may read the NaN elsewhere."""
        sizes, width = self.sizes, padded_width(self.sizes.head_width)
        shape = (self.num_blocks, NUM_LAYERS, 2, sizes.heads + sizes.spare, BLOCK_SIZE * width)
        cache = np.full(shape, np.nan, sizes.cache)
        for table, held in zip(self.tables_of_rows, self.held_lens(), strict=True):
            if self.has_states:
                for layer in range(NUM_LAYERS * (held > 0)):
                    row_states(torch.from_numpy(cache), int(table[0]), layer, sizes.width)[held % 2] = torch.from_numpy(
                        self.floats(sizes.width)
                    )
                continue
            for block, first in zip(table, range(0, held, BLOCK_SIZE), strict=False):
                end = min(BLOCK_SIZE, held - first)
                keys = cache[block, :, 0].reshape(NUM_LAYERS, -1, width, BLOCK_SIZE)
                values = cache[block, :, 1].reshape(NUM_LAYERS, -1, BLOCK_SIZE, width)
                drawn = self.floats(2, NUM_LAYERS, sizes.heads, end, sizes.head_width)
                keys[:, : sizes.heads, : sizes.head_width, :end] = drawn[0].swapaxes(2, 3)
                values[:, : sizes.heads, :end, : sizes.head_width] = drawn[1]
        return cache

    def held_lens(self) -> list[int]:
        """Return the number of tokens of each row that are in the cache before the call."""
        if not self.has_rows:
            return [0] * len(self.sizes.lens)
        new = [0] * len(self.sizes.new) if self.reads_sources else self.sizes.new
        return [length - count for length, count in zip(self.sizes.lens, new, strict=True)]

    def block_tables(self) -> Ints:
        return self.tables_of_rows

    def source_lens(self) -> Ints:
        return ints(*self.sizes.lens)

    def after(self) -> Ints:
        return ints(0)

    def picks(self) -> Ints:
        is_every = len(self.sizes.edits) == self.num_tokens and self.rng.random() < 0.5
        return ints(*range(self.num_tokens)) if is_every else self.below(self.num_tokens, len(self.sizes.edits))

    def float_params(self) -> Floats:
        columns = [self.chosen(_FLOAT_PARAMS[name], len(self.sizes.edits)) for name in FLOAT_PARAMS]
        return np.stack(columns, axis=1)

    def int_params(self) -> Array:
        count, vocab = len(self.sizes.edits), self.sizes.outputs
        choices = {
            "top_k": [0, 1, 5, vocab, HIGHEST], "seed": self.rng.integers(-(2**63), 2**63 - 1, 9),
            "forced_id": [-1, -1, 0, vocab - 1], "num_logprobs": [-1, 0, 1, vocab // 2, vocab, vocab + 3],
            "is_normalized": [0, 1], "restriction": [0, 1],
        }  # fmt: skip
        return np.stack([self.rng.choice(np.array(choices[name]), count) for name in INT_PARAMS], axis=1)

    def edit_offsets(self) -> Ints:
        return ramp(self.sizes.edits)

    def edit_ids(self) -> Ints:
        return self.below(self.sizes.outputs, sum(self.sizes.edits) + self.sizes.spare)

    def edit_values(self) -> Floats:
        count = sum(self.sizes.edits) + self.sizes.spare
        columns = ([-np.inf, -3e38, -2, 0, 1, 3e38], [1e-45, 0.3, 1, 2, 3e38], [-np.inf, -1, 0, 3e38])
        return np.stack([self.chosen(column, count) for column in columns], axis=1)
