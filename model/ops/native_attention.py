"""Attention operators of the native lowering: over packed sources, and over blocks of the cache pool.

Registered with PyTorch as `antiphon::packed_attention`, `disentangled_attention`, `paged_self_attention`,
`paged_cross_attention` and `paged_write`, each with an eager reference that loops over rows, and a shape rule.
Functional: operators that change the cache return a new one; their ONNX nodes change it in place. The pool's layout is
cache_pool.py's.

Axes: N tokens of a run, packed; B sources, R rows, X and Y table widths, H heads, D head width, T positions.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from antiphon.model.ops.attention import attention
from antiphon.model.ops.cache_pool import read_positions, write_position
from antiphon.model.ops.disentangled import position_scores

_PACKED_ATTENTION = (
    "(Tensor qkv, Tensor offsets, Tensor? bias_table, Tensor? slopes, *, int num_heads, float scale, bool causal)"
    " -> Tensor"
)
_DISENTANGLED_ATTENTION = (
    "(Tensor qkv, Tensor offsets, Tensor position_rows, Tensor? position_keys, Tensor? position_queries, *,"
    " int num_heads, float scale) -> Tensor"
)
_PAGED_SELF_ATTENTION = (
    "(Tensor qkv, Tensor cache, Tensor block_tables, Tensor offsets, Tensor positions, Tensor? bias_table,"
    " Tensor? slopes, *, int num_heads, float scale, int layer) -> (Tensor, Tensor)"
)
_PAGED_CROSS_ATTENTION = (
    "(Tensor query, Tensor cache, Tensor block_tables, Tensor offsets, Tensor source_lens, *, int num_heads,"
    " float scale, int layer) -> Tensor"
)
_PAGED_WRITE = (
    "(Tensor kv, Tensor cache, Tensor block_tables, Tensor offsets, Tensor? after, *, int num_heads, int layer)"
    " -> (Tensor, Tensor)"
)


def score_bias(query_positions: Tensor, keys: int, bias_table: Tensor | None, slopes: Tensor | None) -> Tensor | None:
    """What is added to scores of queries at these positions [T] and keys at 0 to keys - 1; [1, H, T, keys] or None.

    bias_table [H, 2 * reach + 1]: by distance key - query, the farthest entry for all beyond (T5: Raffel et al. 2020,
    section 2.1). slopes [H]: minus slope * |distance| (ALiBi: Press et al. 2022, section 3).
    """
    if bias_table is None and slopes is None:
        return None
    distance = torch.arange(keys) - query_positions.long()[:, None]  # [T, keys]
    bias = torch.zeros(1, 1, *distance.shape)
    if bias_table is not None:
        reach = bias_table.shape[1] // 2
        bias = bias + bias_table[:, distance.clamp(-reach, reach) + reach]
    if slopes is not None:
        bias = bias - slopes[:, None, None] * distance.abs()
    return bias


def split_heads(packed: Tensor, parts: int, num_heads: int) -> tuple[Tensor, ...]:
    """[T, parts * H * D] -> each part as [T, H, D]."""
    width = packed.shape[1] // (parts * num_heads)
    return packed.reshape(packed.shape[0], parts, num_heads, width).unbind(1)


def _spans(offsets: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(offsets.tolist()))


@torch.library.custom_op("antiphon::packed_attention", mutates_args=(), schema=_PACKED_ATTENTION)
def packed_attention(
    qkv: Tensor,
    offsets: Tensor,
    bias_table: Tensor | None,
    slopes: Tensor | None,
    *,
    num_heads: int,
    scale: float,
    causal: bool,
) -> Tensor:
    """Attention of each packed sequence over itself (Vaswani et al. 2017, section 3.2.1), without padding.

    qkv [N, 3 H D] float32: queries, keys, values; offsets [B + 1] int32: sequence b is tokens offsets[b] to
    offsets[b + 1]; bias_table [H, 2 * reach + 1] and slopes [H] as in `score_bias`, or None. Returns [N, H D].
    """
    mixed = qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)
    for start, stop in _spans(offsets):
        query, key, value = split_heads(qkv[start:stop], 3, num_heads)  # [T, H, D]
        bias = score_bias(torch.arange(stop - start), stop - start, bias_table, slopes)
        found = attention(query[None], key[None], value[None], None, bias, causal=causal, scale=scale)
        mixed[start:stop] = found[0].flatten(1)
    return mixed


@packed_attention.register_fake
def _packed_attention_shape(
    qkv: Tensor,
    offsets: Tensor,
    bias_table: Tensor | None,
    slopes: Tensor | None,
    *,
    num_heads: int,
    scale: float,
    causal: bool,
) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)


@torch.library.custom_op("antiphon::disentangled_attention", mutates_args=(), schema=_DISENTANGLED_ATTENTION)
def disentangled_attention(
    qkv: Tensor,
    offsets: Tensor,
    position_rows: Tensor,
    position_keys: Tensor | None,
    position_queries: Tensor | None,
    *,
    num_heads: int,
    scale: float,
) -> Tensor:
    """`packed_attention` with scores of relative positions (He et al. 2021, section 3.1), see disentangled.py.

    qkv [N, 3 H D] float32; offsets [B + 1] int32; position_rows [2 * reach + 1] int32: by distance query - key the row
    of the tables, never falling, the farthest for all beyond; position_keys, position_queries [P, H D] float32 or
    None. Returns [N, H D].
    """
    mixed = qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)
    reach = len(position_rows) // 2
    for start, stop in _spans(offsets):
        query, key, value = (part[None] for part in split_heads(qkv[start:stop], 3, num_heads))  # [1, T, H, D]
        stands = torch.arange(stop - start)
        rows = position_rows[(stands[:, None] - stands).clamp(-reach, reach) + reach].long()
        bias = position_scores(query, key, position_keys, position_queries, rows) * scale
        mixed[start:stop] = attention(query, key, value, None, bias, causal=False, scale=scale)[0].flatten(1)
    return mixed


@disentangled_attention.register_fake
def _disentangled_attention_shape(
    qkv: Tensor,
    offsets: Tensor,
    position_rows: Tensor,
    position_keys: Tensor | None,
    position_queries: Tensor | None,
    *,
    num_heads: int,
    scale: float,
) -> Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)


@torch.library.custom_op("antiphon::paged_self_attention", mutates_args=(), schema=_PAGED_SELF_ATTENTION)
def paged_self_attention(
    qkv: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    offsets: Tensor,
    positions: Tensor,
    bias_table: Tensor | None,
    slopes: Tensor | None,
    *,
    num_heads: int,
    scale: float,
    layer: int,
) -> tuple[Tensor, Tensor]:
    """Append each row's new tokens to its blocks, then attend from each to all positions up to its own.

    qkv [N, 3 H D] float32; cache [num_blocks, L, 2, H, 16 * Dp] float32 or float16; block_tables [R, X] int32;
    offsets [R + 1] int32: the new tokens of row r are offsets[r] to offsets[r + 1]; positions [N] int32, where each
    stands in its row; bias_table, slopes as in `score_bias`. Returns ([N, H D], the cache with the tokens appended).
    """
    cache, mixed = cache.clone(), qkv.new_zeros(qkv.shape[0], qkv.shape[1] // 3)
    for table, (start, stop) in zip(block_tables.tolist(), _spans(offsets), strict=True):
        query, key, value = split_heads(qkv[start:stop], 3, num_heads)  # [T, H, D]
        stands = positions[start:stop].tolist()
        for token, position in enumerate(stands):
            write_position(cache, layer, table, position, key[token], value[token])
        for token, position in enumerate(stands):
            held = read_positions(cache, layer, table, position + 1, query.shape[2])
            bias = score_bias(torch.tensor([position]), position + 1, bias_table, slopes)
            mixed[start + token] = _attend_one(query[token], *held, bias, scale)
    return mixed, cache


@paged_self_attention.register_fake
def _paged_self_attention_shape(
    qkv: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    offsets: Tensor,
    positions: Tensor,
    bias_table: Tensor | None,
    slopes: Tensor | None,
    *,
    num_heads: int,
    scale: float,
    layer: int,
) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3), torch.empty_like(cache)


@torch.library.custom_op("antiphon::paged_cross_attention", mutates_args=(), schema=_PAGED_CROSS_ATTENTION)
def paged_cross_attention(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    offsets: Tensor,
    source_lens: Tensor,
    *,
    num_heads: int,
    scale: float,
    layer: int,
) -> Tensor:
    """Attend from each row's tokens to its source, whose keys and values its cross blocks hold.

    query [N, H D] float32; cache as in `paged_self_attention`; block_tables [R, Y] int32; offsets [R + 1] int32;
    source_lens [R] int32, tokens. Returns [N, H D].
    """
    mixed, queries = torch.zeros_like(query), split_heads(query, 1, num_heads)[0]
    rows = zip(block_tables.tolist(), source_lens.tolist(), _spans(offsets), strict=True)
    for table, length, (start, stop) in rows:
        held = read_positions(cache, layer, table, length, queries.shape[2])
        for token in range(start, stop):
            mixed[token] = _attend_one(queries[token], *held, None, scale)
    return mixed


@paged_cross_attention.register_fake
def _paged_cross_attention_shape(
    query: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    offsets: Tensor,
    source_lens: Tensor,
    *,
    num_heads: int,
    scale: float,
    layer: int,
) -> Tensor:
    return torch.empty_like(query)


def _attend_one(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """One query [H, D] over keys and values [T, H, D]; returns [H D]."""
    return attention(query[None, None], keys[None], values[None], None, bias, causal=False, scale=scale).flatten()


@torch.library.custom_op("antiphon::paged_write", mutates_args=(), schema=_PAGED_WRITE)
def paged_write(
    kv: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    offsets: Tensor,
    after: Tensor | None,
    *,
    num_heads: int,
    layer: int,
) -> tuple[Tensor, Tensor]:
    """Store the keys and values of packed sources in their cross blocks, from position 0.

    kv [N, 2 H D] float32: keys, values; cache as in `paged_self_attention`; block_tables [B, X] int32; offsets
    [B + 1] int32; after [1] int32 or None: not read, it only orders writes. Returns (written [1] int32: N, the cache).
    """
    cache = cache.clone()
    for table, (start, stop) in zip(block_tables.tolist(), _spans(offsets), strict=True):
        keys, values = split_heads(kv[start:stop], 2, num_heads)  # [T, H, D]
        for position in range(stop - start):
            write_position(cache, layer, table, position, keys[position], values[position])
    return torch.tensor([kv.shape[0]], dtype=torch.int32), cache


@paged_write.register_fake
def _paged_write_shape(
    kv: Tensor,
    cache: Tensor,
    block_tables: Tensor,
    offsets: Tensor,
    after: Tensor | None,
    *,
    num_heads: int,
    layer: int,
) -> tuple[Tensor, Tensor]:
    return offsets.new_empty(1), torch.empty_like(cache)
