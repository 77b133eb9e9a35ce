"""Storing the keys and values of packed sources in the cache pool.

Axes: N packed tokens, B sources, X width of a block table, H heads, D head width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from antiphon.ops.cache_pool import write_position
from antiphon.ops.operator import Input, Operator, Output, register
from antiphon.ops.operators.eager_attention import split_heads, token_ranges
from antiphon.ops.shared_inputs import BLOCK_TABLES, CACHE, LAYER, NUM_HEADS, SOURCE_OFFSETS

PAGED_WRITE = Operator(
    name="paged_write",
    purpose="Store the keys and values of packed sources in their cross blocks, from position 0.",
    inputs=(
        Input("kv", "float", "N, 2 H D", "keys and values of each token"),
        CACHE,
        replace(BLOCK_TABLES, axes="B, X", meaning="blocks of each source, in the order of its positions"),
        SOURCE_OFFSETS,
        Input(
            "after", "int32", "1", "output of another write, which must run first; the value is not read", optional=True
        ),
    ),
    attributes=(NUM_HEADS, LAYER),
    outputs=(
        Output("written", "int32", "1", "N"),
        Output("present", "cache", CACHE.axes, "the cache with the sources", updates="cache"),
    ),
    shapes=lambda given: [(1,), given["cache"].shape],
)


@register(PAGED_WRITE)
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
    """Write position by position, in a copy of the cache."""
    cache = cache.clone()
    for table, (start, stop) in zip(block_tables.tolist(), token_ranges(offsets), strict=True):
        keys, values = split_heads(kv[start:stop], 2, num_heads)  # [T, H, D]
        for position in range(stop - start):
            write_position(cache, layer, table, position, keys[position], values[position])
    return torch.tensor([kv.shape[0]], dtype=torch.int32), cache
