"""Reads and writes of the cache pool in plain PyTorch, the reference that the native operators are compared with.

cache_geometry.py describes the layout. Axes: T positions, H heads of a layer, C heads of the pool, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for


def write_position(cache: Tensor, layer: int, table: Sequence[int], position: int, key: Tensor, value: Tensor) -> None:
    """Store one position's key and value, each [H, D], in the cache, rounded to its type."""
    block, lane, (heads, width) = table[position // BLOCK_SIZE], position % BLOCK_SIZE, key.shape
    keys, values = _views(cache[block, layer])
    keys[:heads, :width, lane] = key.to(cache.dtype)
    values[:heads, lane, :width] = value.to(cache.dtype)


def read_positions(
    cache: Tensor, layer: int, table: Sequence[int], length: int, heads: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return keys and values of positions 0 to length - 1, each [T, H, D] float32; read nothing else.

    heads: H and D; H can be less than the pool has.
    """
    count, width = heads
    parts = [_views(cache[table[block], layer]) for block in range(blocks_for(length))]
    keys = torch.cat([keys[:count, :width].permute(2, 0, 1) for keys, _ in parts])  # [16 * blocks, H, D]
    values = torch.cat([values[:count, :, :width].transpose(0, 1) for _, values in parts])
    return keys[:length].float(), values[:length].float()


def _views(block: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of one layer of a block [2, C, 16 * Dp]: keys [C, Dp, 16] and values [C, 16, Dp]."""
    heads = block.shape[1]
    return block[0].view(heads, -1, BLOCK_SIZE), block[1].view(heads, BLOCK_SIZE, -1)
