"""The pool that caches live in: its layout, and the plain way to write and read it.

One tensor `cache [num_blocks, L, 2, H, 16 * Dp]` for self and cross caches, Dp = D rounded up to 16. Index 2 tells keys
(0) from values (1). Inside one (block, layer, head) keys lie transposed, [Dp, 16], so that one vector holds the same
component of 16 positions, values as [16, Dp]; what is beyond D is unused. Block b of a sequence's table holds its
positions 16 b to 16 b + 15 (paged attention: Kwon et al. 2023, section 4). The reference that the native operators and
the tests share; nothing here is fast. Loads torch only when there are tensors to read.

Axes: L layers, H heads, D head width, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from antiphon.model.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_SIZE = 16
_LANES = 16


def padded_width(width: int) -> int:
    """Dp: a head's width as the pool stores it."""
    return -(-width // _LANES) * _LANES


def pool_axes(config: ModelConfig) -> tuple[int, int, int, int]:
    """Every axis of the pool but the number of blocks: L, 2, H, 16 * Dp."""
    block = BLOCK_SIZE * padded_width(config.resolved_head_dim)
    return (config.decoder_layers, 2, config.num_heads, block)


def blocks_for(length: int) -> int:
    """Blocks that `length` positions take."""
    return -(-length // BLOCK_SIZE)


def write_position(cache: Tensor, layer: int, table: Sequence[int], position: int, key: Tensor, value: Tensor) -> None:
    """Store one position's key and value, each [H, D], changing the cache; rounded to its type."""
    block, lane, width = table[position // BLOCK_SIZE], position % BLOCK_SIZE, key.shape[1]
    keys, values = _views(cache[block, layer])
    keys[:, :width, lane] = key.to(cache.dtype)
    values[:, lane, :width] = value.to(cache.dtype)


def read_positions(cache: Tensor, layer: int, table: Sequence[int], length: int, width: int) -> tuple[Tensor, Tensor]:
    """Keys and values of positions 0 to length - 1, each [T, H, D] float32; touches nothing else of the pool."""
    import torch

    parts = [_views(cache[table[block], layer]) for block in range(blocks_for(length))]
    keys = torch.cat([keys[:, :width].permute(2, 0, 1) for keys, _ in parts])  # [16 * blocks, H, D]
    values = torch.cat([values[:, :, :width].transpose(0, 1) for _, values in parts])
    return keys[:length].float(), values[:length].float()


def _views(block: Tensor) -> tuple[Tensor, Tensor]:
    """One block's layer [2, H, 16 * Dp] as keys [H, Dp, 16] and values [H, 16, Dp], sharing its memory."""
    heads = block.shape[1]
    return block[0].view(heads, -1, BLOCK_SIZE), block[1].view(heads, BLOCK_SIZE, -1)
