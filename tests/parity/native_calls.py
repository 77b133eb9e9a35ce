"""Random valid calls of every native operator, with sizes around the tile sizes of the kernels, and empty ones.

A call has the operator's arrays (None for an absent optional input) and its attributes. Attributes come from short
lists, so that one session serves many calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.export.weights import pack_float, pack_int4, pack_int8
from antiphon.ops.activations import ACTIVATIONS
from antiphon.ops.cache_geometry import BLOCK_SIZE, padded_width
from antiphon.ops.operator import NODE_PREFIXES
from antiphon.ops.sampling import FLOAT_PARAMS
from tests.parity.native_nodes import ramp

Rng = np.random.Generator
Arrays = dict[str, NDArray[Any] | None]
Call = tuple[Arrays, dict[str, Any]]

LOWEST, HIGHEST = -(2**31), 2**31 - 1
_OUTPUTS = [1, 16, 40, 257]
_HEADS = [(1, 8), (2, 16), (3, 24), (1, 70)]
_LAYERS = 2


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


def floats(rng: Rng, *shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape, np.float32)


def maybe(rng: Rng, array: NDArray[Any]) -> NDArray[Any] | None:
    return array if rng.random() < 0.5 else None


def pick(rng: Rng, choices: Sequence[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def packed_weight(weight: NDArray[np.float32], precision: str) -> Arrays:
    """Return the inputs of a node in place of a weight [O, K]."""
    if precision == "float32":
        return {"weight": pack_float(weight)}
    if precision == "int8":
        held = pack_int8(weight)
        return {"weight": held.integers, "scales": held.scales, "column_sums": held.column_sums}
    nibbles = pack_int4(weight)
    return {
        "weight": nibbles.nibbles, "ratios": nibbles.ratios, "scales": nibbles.scales, "offsets": nibbles.offsets
    }  # fmt: skip


def _packed(rng: Rng, outputs: int, inputs: int, precision: str) -> Arrays:
    """Return a packed weight. One without inputs is a slice of a packed weight with one input."""
    arrays = packed_weight(floats(rng, outputs, max(inputs, 1)), precision)
    if inputs:
        return arrays
    return {
        name: np.ascontiguousarray(array[:, :0]) if array is not None and array.ndim > 1 else array
        for name, array in arrays.items()
    }


def _product(rng: Rng, prefix: str, outputs: int, inputs: int, precision: str) -> Arrays:
    """Return a packed weight and maybe a bias, under names with a prefix."""
    arrays = {**_packed(rng, outputs, inputs, precision), "bias": maybe(rng, floats(rng, outputs))}
    return {prefix + name: array for name, array in arrays.items()}


def _embed(rng: Rng, *, quantized: bool) -> Call:
    rows, width, vocab = any_size(rng), pick(rng, _OUTPUTS), pick(rng, _OUTPUTS)
    arrays: Arrays = {
        "input_ids": rng.integers(0, vocab, rows), "positions": rng.integers(0, 30, rows, np.int32),
        **_packed(rng, vocab, width, "int8" if quantized else "float32"),
        "position_table": maybe(rng, floats(rng, 30, width)),
    }  # fmt: skip
    arrays.pop("column_sums", None)
    return arrays, dict(width=width, vocab=vocab, scale=2.0)


def _linear(rng: Rng, precision: str) -> Call:
    rows, inputs, outputs = any_size(rng, 200), any_size(rng), pick(rng, _OUTPUTS)
    arrays: Arrays = {"x": floats(rng, rows, inputs), **_product(rng, "", outputs, inputs, precision)}
    return arrays, dict(width=outputs, activation=pick(rng, [*ACTIVATIONS]))


def _add_norm(rng: Rng) -> Call:
    rows, width = any_size(rng), any_size(rng)
    arrays: Arrays = {
        "x": floats(rng, rows, width), "residual": maybe(rng, floats(rng, rows, width)),
        "weight": maybe(rng, floats(rng, width)), "bias": maybe(rng, floats(rng, width)),
    }  # fmt: skip
    return arrays, dict(epsilon=1e-5, kind=pick(rng, ["layer", "rms"]))


def _lens(rng: Rng, least: int = 0) -> list[int]:
    """Return the lengths of up to five sequences, sometimes of none."""
    return [max(least, any_size(rng, 200)) for _ in range(int(rng.integers(0, 6)))]


def _biases(rng: Rng, heads: int) -> Arrays:
    reach = int(rng.integers(0, 40))
    return {"bias_table": maybe(rng, floats(rng, heads, 2 * reach + 1)), "slopes": maybe(rng, floats(rng, heads))}


def _packed_attention(rng: Rng) -> Call:
    (heads, width), lens = pick(rng, _HEADS), _lens(rng)
    arrays: Arrays = {
        "qkv": floats(rng, sum(lens), 3 * heads * width), "offsets": ramp(lens), **_biases(rng, heads)
    }  # fmt: skip
    return arrays, dict(num_heads=heads, scale=0.3, causal=pick(rng, [0, 1]))


def _disentangled_attention(rng: Rng) -> Call:
    (heads, width), lens = pick(rng, _HEADS), _lens(rng)
    rows = np.cumsum(rng.integers(0, pick(rng, [1, 2, 3]), 2 * int(rng.integers(0, 200)) + 1)).astype(np.int32)
    count = int(rows[-1]) + 1
    arrays: Arrays = {
        "qkv": floats(rng, sum(lens), 3 * heads * width), "offsets": ramp(lens), "position_rows": rows,
        "position_keys": maybe(rng, floats(rng, count, heads * width)),
        "position_queries": maybe(rng, floats(rng, count, heads * width)),
    }  # fmt: skip
    return arrays, dict(num_heads=heads, scale=0.3)


def _pool(rng: Rng, lens: Sequence[int], heads: int, width: int) -> Arrays:
    """Return a pool of either element type with the blocks that these lengths need, and the block tables."""
    counts = [-(-length // BLOCK_SIZE) for length in lens]
    blocks = sum(counts) + int(rng.integers(0, 2))
    order = iter(rng.permutation(blocks))
    tables = np.full((len(lens), max(counts, default=0) + int(rng.integers(0, 2))), pick(rng, [LOWEST, -1, HIGHEST]))
    for row, count in zip(tables, counts, strict=True):
        row[:count] = [next(order) for _ in range(count)]
    cache = floats(rng, blocks, _LAYERS, 2, heads + int(rng.integers(0, 2)), BLOCK_SIZE * padded_width(width))
    return {"cache": cache.astype(pick(rng, ["float32", "float16"])), "block_tables": tables.astype(np.int32)}


def _paged_self_attention(rng: Rng) -> Call:
    (heads, width), new = pick(rng, _HEADS), [max(1, size % 21) for size in _lens(rng)]
    held = [any_size(rng) for _ in new]
    spans = [np.arange(past, past + count) for past, count in zip(held, new, strict=True)]
    lens = [past + count for past, count in zip(held, new, strict=True)]
    arrays: Arrays = {
        "qkv": floats(rng, sum(new), 3 * heads * width), **_pool(rng, lens, heads, width), "offsets": ramp(new),
        "positions": np.concatenate([*spans, []]).astype(np.int32), **_biases(rng, heads),
    }  # fmt: skip
    return arrays, dict(num_heads=heads, scale=0.3, layer=pick(rng, range(_LAYERS)))


def _paged_cross_attention(rng: Rng) -> Call:
    (heads, width), lens = pick(rng, _HEADS), _lens(rng, 1)
    new = [int(rng.integers(0, 4)) for _ in lens]
    arrays: Arrays = {
        "query": floats(rng, sum(new), heads * width), **_pool(rng, lens, heads, width), "offsets": ramp(new),
        "source_lens": np.array(lens, np.int32),
    }  # fmt: skip
    return arrays, dict(num_heads=heads, scale=0.3, layer=pick(rng, range(_LAYERS)))


def _paged_write(rng: Rng) -> Call:
    (heads, width), lens = pick(rng, _HEADS), _lens(rng)
    arrays: Arrays = {
        "kv": floats(rng, sum(lens), 2 * heads * width), **_pool(rng, lens, heads, width), "offsets": ramp(lens),
        "after": maybe(rng, np.zeros(1, np.int32)),
    }  # fmt: skip
    return arrays, dict(num_heads=heads, layer=pick(rng, range(_LAYERS)))


def _edits(rng: Rng, count: int, vocab: int) -> Arrays:
    """Return logits processors of `count` choices: mostly few, some tokens twice, and unused room at the end."""
    offsets = ramp([int(rng.integers(0, pick(rng, [1, 2, 20]))) for _ in range(count)])
    room = int(offsets[-1]) + int(rng.integers(0, 3))
    values = [
        rng.choice(np.array(column, np.float32), room)
        for column in ([-np.inf, -3e38, -2, 0, 1, 3e38], [1e-45, 0.3, 1, 2, 3e38], [-np.inf, -1, 0, 3e38])
    ]
    return {
        "edit_offsets": offsets, "edit_ids": rng.integers(0, vocab, room, np.int32),
        "edit_values": np.stack(values, axis=1),
    }  # fmt: skip


_FLOAT_PARAMS = {
    "temperature": np.array([0, 0, 1e-45, 0.3, 1, 3e38, np.inf], np.float32),
    "top_p": np.array([0, 1e-30, 0.5, 0.95, 1, 7, np.inf], np.float32),
    "min_p": np.array([0, 0, 1e-30, 0.1, 1], np.float32),
    "typical_p": np.array([0, 1e-30, 0.2, 0.95, 1, 1, np.inf], np.float32),
}


def _sample(rng: Rng, *, quantized: bool) -> Call:
    tokens, width, vocab = any_size(rng), any_size(rng), pick(rng, [*_OUTPUTS, 700])
    count = tokens if rng.random() < 0.5 else any_size(rng, 40) * bool(tokens)
    picks = rng.integers(0, max(tokens, 1), count, np.int32)
    arrays: Arrays = {
        "hidden": floats(rng, tokens, width), **_packed(rng, vocab, width, "int8" if quantized else "float32"),
        "positions": rng.integers(LOWEST, HIGHEST, tokens, np.int32),
        "picks": np.arange(count, dtype=np.int32) if count == tokens and rng.random() < 0.5 else picks,
        "float_params": np.stack([rng.choice(_FLOAT_PARAMS[name], count) for name in FLOAT_PARAMS], axis=1),
        "int_params": np.stack(
            [
                rng.choice(np.array([0, 1, 5, vocab, HIGHEST]), count),
                rng.integers(-(2**63), 2**63 - 1, count),
                rng.choice(np.array([-1, -1, 0, vocab - 1]), count),
                rng.choice(np.array([-1, 0, 1, vocab // 2, vocab, vocab + 3]), count),
                rng.integers(0, 2, count),
                rng.integers(0, 2, count),
            ],
            axis=1,
        ),
        **_edits(rng, count, vocab), "bias": maybe(rng, floats(rng, vocab)),
    }  # fmt: skip
    return arrays, dict(vocab=vocab)


def _states(rng: Rng, tokens: int, width: int) -> Arrays:
    return {"x": floats(rng, tokens, width), "residual": floats(rng, tokens, width)}


def _norm(rng: Rng, width: int) -> Arrays:
    return {"norm_weight": maybe(rng, floats(rng, width)), "norm_bias": maybe(rng, floats(rng, width))}


def _norm_attributes(rng: Rng) -> dict[str, Any]:
    return dict(epsilon=1e-5, kind=pick(rng, ["layer", "rms"]))


def _feed_forward_sublayer(rng: Rng, precision: str) -> Call:
    tokens, width, gated, half = any_size(rng, 300), pick(rng, [16, 40, 70]), pick(rng, [0, 1]), pick(rng, [8, 40])
    arrays: Arrays = {
        **_states(rng, tokens, width), **_product(rng, "inner_", 2 * half, width, precision),
        **_product(rng, "outer_", width, half if gated else 2 * half, precision), **_norm(rng, width),
    }  # fmt: skip
    activation = pick(rng, [*ACTIVATIONS])
    return arrays, dict(activation=activation, gated=gated, inner_width=2 * half, **_norm_attributes(rng))


def _attention_sublayer(rng: Rng, attention: Call, projected: str, parts: int, precision: str) -> Call:
    """Return the sublayer around an attention, whose first input the first product computes."""
    (first, *others), attributes = attention
    states = attention[0][first]
    assert states is not None
    width, heads = pick(rng, [16, 40]), states.shape[1] // parts
    arrays: Arrays = {
        **_states(rng, len(states), width), **_product(rng, f"{projected}_", parts * heads, width, precision),
        **_product(rng, "out_", width, heads, precision), **_norm(rng, width),
        **{name: attention[0][name] for name in others},
    }  # fmt: skip
    sizes = {f"{projected}_width": parts * heads}
    return arrays, {**attributes, **_norm_attributes(rng), **sizes}


def _with_rotation(rng: Rng, call: Call) -> Call:
    """Add the table of rotary positions, or none."""
    arrays, attributes = call
    positions = arrays["positions"]
    assert positions is not None
    width = attributes["qkv_width"] // (3 * attributes["num_heads"])
    table = floats(rng, int(positions.max(initial=0)) + 1, width) if width % 2 == 0 else None
    return {**arrays, "rotary_table": table if table is None else maybe(rng, table)}, attributes


def _packed_sublayer(rng: Rng, precision: str) -> Call:
    arrays, attributes = _attention_sublayer(rng, _packed_attention(rng), "qkv", 3, precision)
    x = arrays["x"]
    assert x is not None
    arrays["positions"] = rng.integers(0, 9, len(x), np.int32)
    return _with_rotation(rng, (arrays, attributes))


def _paged_self_sublayer(rng: Rng, precision: str) -> Call:
    return _with_rotation(rng, _attention_sublayer(rng, _paged_self_attention(rng), "qkv", 3, precision))


_SUBLAYERS: dict[str, Callable[[Rng, str], Call]] = {
    "FeedForwardSublayer": _feed_forward_sublayer,
    "PackedAttentionSublayer": _packed_sublayer,
    "PagedSelfAttentionSublayer": _paged_self_sublayer,
    "PagedCrossAttentionSublayer": lambda rng, precision: _attention_sublayer(
        rng, _paged_cross_attention(rng), "query", 1, precision
    ),
}


def _sublayer_calls() -> dict[str, Callable[[Rng], Call]]:
    """Return the calls of every sublayer at every precision, by name of the node."""
    return {
        prefix + name: partial(_call_at, make, precision)
        for name, make in _SUBLAYERS.items()
        for precision, prefix in NODE_PREFIXES.items()
    }


def _call_at(make: Callable[[Rng, str], Call], precision: str, rng: Rng) -> Call:
    return make(rng, precision)


CALLS: dict[str, Callable[[Rng], Call]] = {
    "Embed": lambda rng: _embed(rng, quantized=False),
    "QuantizedEmbed": lambda rng: _embed(rng, quantized=True),
    "Linear": lambda rng: _linear(rng, "float32"),
    "QuantizedLinear": lambda rng: _linear(rng, "int8"),
    "NibbleLinear": lambda rng: _linear(rng, "int4"),
    "AddNorm": _add_norm,
    "DisentangledAttention": _disentangled_attention,
    "PagedWrite": _paged_write,
    "Sample": lambda rng: _sample(rng, quantized=False),
    "QuantizedSample": lambda rng: _sample(rng, quantized=True),
    **_sublayer_calls(),
}
