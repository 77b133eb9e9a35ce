"""Geometry of the cache: tokens of a block, blocks of a sequence, and axes of the pool.

The pool is one tensor `cache [num_blocks, L, 2, C, 16 * Dp]` for self and cross caches, Dp = D rounded up to 16.
Index 2 selects keys (0) or values (1). An attention module with H < C heads uses the first H. Inside one (block, layer,
head) keys are stored transposed, [Dp, 16], so that one vector holds the same component of 16 positions; values are
stored as [16, Dp]. Components beyond D are unused. Block b of a sequence's table holds its positions 16 b to 16 b + 15
(paged attention: Kwon et al. 2023, section 4). Torch-free.

Where the decoder keeps a state of constant size instead of keys and values (ModelConfig.decoder_self), a sequence has
one block for its whole target, with two float32 vectors of the model's width at the beginning of each layer's part. The
state after n tokens is vector n mod 2, so that a step that failed can run again.

The pool of a GPU is `cache [num_blocks, L, 2, H, 16, D]`: both keys and values are stored as [16, D], so that threads
read whole vectors.

Axes: L layers, H heads, C heads of the pool (ModelConfig.cache_heads), D head width.
"""

from __future__ import annotations

from antiphon.architecture.config import ModelConfig

BLOCK_SIZE = 16
"""Number of tokens in a block. The native operators are compiled for this number."""
_LANES = 16


def blocks_for(num_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Return the number of blocks for `num_tokens` tokens; the last block can be partly empty."""
    return -(-num_tokens // block_size)


def target_block_size(config: ModelConfig) -> int:
    """Return the number of target tokens of a block: all of them where the decoder's state has a constant size."""
    return BLOCK_SIZE if config.decoder_self == "attention" else config.max_target_len


def blocks_of_longest(config: ModelConfig) -> int:
    """Return the number of blocks for one sequence with the longest source and the longest target."""
    if not config.decoder_layers:
        return 0
    source_len = config.max_source_len if config.encoder_layers else 0
    return blocks_for(source_len) + blocks_for(config.max_target_len, target_block_size(config))


def padded_width(width: int) -> int:
    """Return Dp, the width of a head in the pool."""
    return -(-width // _LANES) * _LANES


def pool_axes(config: ModelConfig) -> tuple[int, int, int, int]:
    """Return the axes of the pool except the number of blocks: L, 2, C, 16 * Dp."""
    block = BLOCK_SIZE * padded_width(config.resolved_head_dim)
    return (config.decoder_layers, 2, config.cache_heads, block)


def cuda_pool_axes(config: ModelConfig) -> tuple[int, int, int, int, int]:
    """Return the axes of a GPU's pool except the number of blocks: L, 2, H, 16, D."""
    return (config.decoder_layers, 2, config.num_heads, BLOCK_SIZE, config.resolved_head_dim)
