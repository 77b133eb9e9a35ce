"""Whole sublayers as one operator each: products, attention or activation, residual sum and the norm after it.

The native kernels save nodes and tensors. Each row goes through the same kernels as in separate operators, so their
products and norms have the bits of those.

Axes: N packed tokens, M model width; F outputs of the first product of a feed-forward layer, G inputs of the second
one, which is F / 2 with a gate; B sources, R rows, X and Y widths of block tables, L layers, C heads of the pool;
H heads, D head width, P positions.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from antiphon.ops.activations import ACTIVATIONS
from antiphon.ops.operator import Attribute, Input, Operator, Output, PackedWeight, register
from antiphon.ops.operators.attention import packed_attention, paged_cross_attention, paged_self_attention, rotary
from antiphon.ops.operators.linear import gate, linear
from antiphon.ops.operators.rows import add_norm
from antiphon.ops.shared_inputs import (
    BIAS_TABLE,
    BLOCK_TABLES,
    CACHE,
    CAP,
    CAUSAL,
    LAYER,
    NORM,
    NORM_WEIGHTS,
    NUM_HEADS,
    OUTLIERS,
    PARTS,
    ROTARY_TABLE,
    ROW_OFFSETS,
    SCALE,
    SLOPES,
    SOURCE_OFFSETS,
    SUBLAYER_INPUTS,
    SUBLAYER_OUTPUTS,
)


def _weight(prefix: str, axes: str, width: str, meaning: str) -> tuple[Input, Input]:
    """Return the inputs of a product's weight and bias."""
    return (
        Input(f"{prefix}_weight", "float", axes, meaning),
        Input(f"{prefix}_bias", "float", width, "added to every row", optional=True),
    )


FEED_FORWARD_SUBLAYER = Operator(
    name="feed_forward_sublayer",
    purpose="norm(residual + feed-forward layer of x) (Vaswani et al. 2017, section 3.3).",
    inputs=(
        *SUBLAYER_INPUTS,
        *_weight("inner", "F, M", "F", "first product"),
        *_weight("outer", "M, G", "M", "second product"),
        *NORM_WEIGHTS,
    ),
    attributes=(
        Attribute("activation", str, f"one of {', '.join(ACTIVATIONS)}"),
        Attribute("gated", bool, "the second half of the first product is multiplied by its activated first half"),
        *NORM,
    ),
    outputs=SUBLAYER_OUTPUTS,
    shapes=lambda inputs: [inputs["x"].shape, inputs["x"].shape],
    weights=(
        PackedWeight(name="inner_weight", sizes=("inner_width",), parts=PARTS, outliers=OUTLIERS),
        PackedWeight(name="outer_weight", sizes=(), parts=PARTS, outliers=OUTLIERS),
    ),
)

PACKED_ATTENTION_SUBLAYER = Operator(
    name="packed_attention_sublayer",
    purpose="norm(residual + attention of each packed sequence over itself, without padding).",
    inputs=(
        *SUBLAYER_INPUTS,
        *_weight("qkv", "3 H D, M", "3 H D", "product to queries, keys and values"),
        *_weight("out", "M, H D", "M", "product after the attention"),
        *NORM_WEIGHTS,
        SOURCE_OFFSETS,
        BIAS_TABLE,
        SLOPES,
        Input("positions", "int32", "N", "position of each token; read only with rotary_table", optional=True),
        ROTARY_TABLE,
    ),
    attributes=(
        NUM_HEADS,
        SCALE,
        CAUSAL,
        *NORM,
        CAP,
    ),
    outputs=SUBLAYER_OUTPUTS,
    shapes=lambda inputs: [inputs["x"].shape, inputs["x"].shape],
    weights=(
        PackedWeight(name="qkv_weight", sizes=("qkv_width",), parts=PARTS, outliers=OUTLIERS),
        PackedWeight(name="out_weight", sizes=(), parts=PARTS, outliers=OUTLIERS),
    ),
)

PAGED_SELF_ATTENTION_SUBLAYER = Operator(
    name="paged_self_attention_sublayer",
    purpose="norm(residual + attention of each row's new tokens over its blocks, to which they are appended).",
    inputs=(
        *SUBLAYER_INPUTS,
        *_weight("qkv", "3 H D, M", "3 H D", "product to queries, keys and values"),
        *_weight("out", "M, H D", "M", "product after the attention"),
        *NORM_WEIGHTS,
        CACHE,
        BLOCK_TABLES,
        ROW_OFFSETS,
        Input("positions", "int32", "N", "position of each new token in its row"),
        BIAS_TABLE,
        SLOPES,
        ROTARY_TABLE,
    ),
    attributes=(NUM_HEADS, SCALE, LAYER, *NORM, CAP),
    outputs=(
        *SUBLAYER_OUTPUTS,
        Output("present", "cache", CACHE.axes, "the cache with the new tokens", updates="cache"),
    ),
    shapes=lambda inputs: [inputs["x"].shape, inputs["x"].shape, inputs["cache"].shape],
    weights=(
        PackedWeight(name="qkv_weight", sizes=("qkv_width",), parts=PARTS, outliers=OUTLIERS),
        PackedWeight(name="out_weight", sizes=(), parts=PARTS, outliers=OUTLIERS),
    ),
)

PAGED_CROSS_ATTENTION_SUBLAYER = Operator(
    name="paged_cross_attention_sublayer",
    purpose="norm(residual + attention of each row's new tokens over its source).",
    inputs=(
        *SUBLAYER_INPUTS,
        *_weight("query", "H D, M", "H D", "product to queries"),
        *_weight("out", "M, H D", "M", "product after the attention"),
        *NORM_WEIGHTS,
        CACHE,
        replace(BLOCK_TABLES, axes="R, Y", meaning="blocks of each row's source, in the order of its positions"),
        ROW_OFFSETS,
        Input("source_lens", "int32", "R", "tokens of each row's source"),
    ),
    attributes=(NUM_HEADS, SCALE, LAYER, *NORM, CAP),
    outputs=SUBLAYER_OUTPUTS,
    shapes=lambda inputs: [inputs["x"].shape, inputs["x"].shape],
    weights=(
        PackedWeight(name="query_weight", sizes=("query_width",), parts=PARTS, outliers=OUTLIERS),
        PackedWeight(name="out_weight", sizes=(), parts=PARTS, outliers=OUTLIERS),
    ),
)


@register(FEED_FORWARD_SUBLAYER)
def feed_forward_sublayer(
    x: Tensor,
    residual: Tensor,
    inner_weight: Tensor,
    inner_bias: Tensor | None,
    outer_weight: Tensor,
    outer_bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    *,
    activation: str,
    gated: bool,
    epsilon: float,
    kind: str,
) -> tuple[Tensor, Tensor]:
    """Multiply, activate or gate, multiply, add and normalise."""
    inner = linear(x, inner_weight, inner_bias, activation="none" if gated else activation)
    states = gate(inner, activation=activation) if gated else inner
    outer = linear(states, outer_weight, outer_bias, activation="none")
    return add_norm(outer, residual, norm_weight, norm_bias, epsilon=epsilon, kind=kind)  # type: ignore[no-any-return]


@register(PACKED_ATTENTION_SUBLAYER)
def packed_attention_sublayer(
    x: Tensor,
    residual: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    offsets: Tensor,
    bias_table: Tensor | None,
    slopes: Tensor | None,
    positions: Tensor | None,
    rotary_table: Tensor | None,
    *,
    num_heads: int,
    scale: float,
    causal: bool,
    epsilon: float,
    kind: str,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Multiply, rotate where there is a table, attend, multiply, add and normalise."""
    qkv = linear(x, qkv_weight, qkv_bias, activation="none")
    if rotary_table is not None:
        assert positions is not None, "rotary_table needs positions"
        qkv = rotary(qkv, positions, rotary_table, num_heads=num_heads)
    attended = packed_attention(
        qkv, offsets, bias_table, slopes, num_heads=num_heads, scale=scale, causal=causal, cap=cap
    )
    out = linear(attended, out_weight, out_bias, activation="none")
    return add_norm(out, residual, norm_weight, norm_bias, epsilon=epsilon, kind=kind)  # type: ignore[no-any-return]


@register(PAGED_SELF_ATTENTION_SUBLAYER)
def paged_self_attention_sublayer(
    x: Tensor,
    residual: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    cache: Tensor,
    block_tables: Tensor,
    offsets: Tensor,
    positions: Tensor,
    bias_table: Tensor | None,
    slopes: Tensor | None,
    rotary_table: Tensor | None,
    *,
    num_heads: int,
    scale: float,
    layer: int,
    epsilon: float,
    kind: str,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply, rotate where there is a table, append and attend in a copy of the cache, multiply, add, normalise."""
    qkv = linear(x, qkv_weight, qkv_bias, activation="none")
    if rotary_table is not None:
        qkv = rotary(qkv, positions, rotary_table, num_heads=num_heads)
    attended, present = paged_self_attention(
        qkv,
        cache,
        block_tables,
        offsets,
        positions,
        bias_table,
        slopes,
        num_heads=num_heads,
        scale=scale,
        layer=layer,
        cap=cap,
    )
    out = linear(attended, out_weight, out_bias, activation="none")
    normed, total = add_norm(out, residual, norm_weight, norm_bias, epsilon=epsilon, kind=kind)
    return normed, total, present


@register(PAGED_CROSS_ATTENTION_SUBLAYER)
def paged_cross_attention_sublayer(
    x: Tensor,
    residual: Tensor,
    query_weight: Tensor,
    query_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    cache: Tensor,
    block_tables: Tensor,
    offsets: Tensor,
    source_lens: Tensor,
    *,
    num_heads: int,
    scale: float,
    layer: int,
    epsilon: float,
    kind: str,
    cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Multiply, attend, multiply, add and normalise."""
    query = linear(x, query_weight, query_bias, activation="none")
    attended = paged_cross_attention(
        query, cache, block_tables, offsets, source_lens, num_heads=num_heads, scale=scale, layer=layer, cap=cap
    )
    out = linear(attended, out_weight, out_bias, activation="none")
    return add_norm(out, residual, norm_weight, norm_bias, epsilon=epsilon, kind=kind)  # type: ignore[no-any-return]
