"""Inputs and attributes that the attention operators share, and the functions by which eager code reads them.

Axes: N packed tokens; B sources, R rows, X width of a block table, H heads, C heads of the pool, D head width, T
positions, L layers.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from antiphon.ops.operator import Attribute, Input

QKV = Input("qkv", "float", "N, 3 H D", "queries, keys and values of each token")
SOURCE_OFFSETS = Input("offsets", "int32", "B + 1", "sequence b holds the tokens offsets[b] to offsets[b + 1] - 1")
ROW_OFFSETS = Input("offsets", "int32", "R + 1", "the new tokens of row r are offsets[r] to offsets[r + 1] - 1")
CACHE = Input(
    "cache",
    "cache",
    "num_blocks, L, 2, C, 16 * Dp",
    "the pool of cache_geometry.py; a layer uses the first H of C heads",
)
BLOCK_TABLES = Input("block_tables", "int32", "R, X", "blocks of each row, in the order of its positions")
BIAS_TABLE = Input(
    "bias_table",
    "float",
    "H, 2 * reach + 1",
    "score bias by distance key - query; the outermost entries cover larger distances (T5: Raffel et al. 2020,"
    " section 2.1)",
    optional=True,
)
SLOPES = Input(
    "slopes",
    "float",
    "H",
    "slope * the absolute distance is subtracted from scores (ALiBi: Press et al. 2022, section 3)",
    optional=True,
)
NUM_HEADS = Attribute("num_heads", int, "H")
SCALE = Attribute("scale", float, "factor of the scores before the bias")
LAYER = Attribute("layer", int, "decoder layer whose part of the cache is used")


def score_bias(query_positions: Tensor, keys: int, bias_table: Tensor | None, slopes: Tensor | None) -> Tensor | None:
    """Return the bias of scores of queries at these positions [T] and keys at 0 to keys - 1; [1, H, T, keys] or None.

    bias_table [H, 2 * reach + 1] and slopes [H] are the inputs declared above.
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
    """Split [T, parts * H * D] into its parts, each [T, H, D]."""
    width = packed.shape[1] // (parts * num_heads)
    return packed.reshape(packed.shape[0], parts, num_heads, width).unbind(1)


def token_ranges(offsets: Tensor) -> list[tuple[int, int]]:
    """Return the first token and the end of every sequence or row."""
    return list(pairwise(offsets.tolist()))
