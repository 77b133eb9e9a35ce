"""Sources packed one after the other, without padding: their lengths, places, cache tables and types.

Pure arithmetic, for encoders on any device. B sources, N their tokens together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.ops.cache_geometry import BLOCK_SIZE


def checked_lengths(sources: Sequence[Sequence[int]], longest: int) -> NDArray[np.int64]:
    """Return the lengths [B]. Raises ValueError unless each is 1 to `longest`."""
    lengths = np.array([len(source) for source in sources], np.int64)
    if not len(lengths) or lengths.min() < 1 or lengths.max() > longest:
        raise ValueError(f"source lengths are {lengths.tolist()}; each must be 1 to {longest}")
    return lengths


def check_table_lens(block_tables: Sequence[Sequence[int]], lengths: NDArray[np.int64]) -> None:
    """Raise ValueError unless each source has as many blocks as its tokens fill."""
    table_lens = [len(table) for table in block_tables]
    if table_lens != (-(-lengths // BLOCK_SIZE)).tolist():
        raise ValueError(f"sources of {lengths.tolist()} tokens cannot fill tables of {table_lens} blocks")


def offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return [B + 1]: source b holds the tokens offsets[b] to offsets[b + 1] - 1."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def positions_of(lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return [N]: the position of each token in its source."""
    offsets = offsets_of(lengths)
    positions: NDArray[np.int32] = np.arange(offsets[-1], dtype=np.int32) - np.repeat(offsets[:-1], lengths)
    return positions


def tables_of(block_tables: Sequence[Sequence[int]], width: int) -> NDArray[np.int32]:
    """Return the blocks of each source as [B, width]; entries beyond a source's blocks are 0."""
    tables = np.zeros((len(block_tables), width), np.int32)
    for row, blocks in enumerate(block_tables):
        tables[row, : len(blocks)] = blocks
    return tables


def types_of(type_ids: Sequence[Sequence[int]], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the token types [N]; 0 for sources without types."""
    types = np.zeros(int(lengths.sum()), np.int64)
    first = 0
    for length, given in zip(lengths.tolist(), type_ids, strict=False):
        if given:
            types[first : first + length] = given
        first += length
    return types


def parts_of(lengths: Sequence[int], max_tokens: int) -> list[slice]:
    """Return the neighbouring sources of each forward pass: at most max_tokens tokens together, or one source."""
    parts, first, num_tokens = [], 0, 0
    for index, length in enumerate(lengths):
        if num_tokens and num_tokens + length > max_tokens:
            parts.append(slice(first, index))
            first, num_tokens = index, 0
        num_tokens += length
    return [*parts, slice(first, len(lengths))]
