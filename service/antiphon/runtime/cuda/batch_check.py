"""The one check of a decoder step before it is launched: no kernel checks an index.

A wrong index on a device reads or writes other requests' memory, or ends the process, so each is compared with its
range here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.ops.cache_geometry import BLOCK_SIZE
from antiphon.runtime.runner import DecodeBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Limits of the arrays of a step: everything is below these numbers, or at most max_source_len."""

    max_rows: int
    num_blocks: int
    vocab_size: int
    max_target_len: int
    max_source_len: int
    has_encoder: bool


def check_batch(batch: DecodeBatch, bounds: Bounds) -> None:
    """Raise ValueError, which names the array, the value and the range, for a batch that kernels must not receive."""
    rows, tokens, sampling = batch.num_rows, batch.num_tokens, batch.sampling
    if not 0 < rows <= bounds.max_rows:
        raise ValueError(f"rows of the batch are {rows}; they must be 1 to {bounds.max_rows}")
    counts = np.diff(batch.offsets)
    if len(counts) != rows or batch.offsets[0] != 0 or batch.offsets[-1] != tokens or counts.min() < 1:
        raise ValueError(f"offsets {batch.offsets.tolist()} do not divide {tokens} tokens into {rows} rows")
    _within("token_ids", batch.token_ids, bounds.vocab_size)
    _within("positions", batch.positions, bounds.max_target_len)
    _check_tables("self_tables", batch.self_tables, _ends(batch), bounds.num_blocks)
    if bounds.has_encoder:
        _within("source_lens", batch.source_lens, bounds.max_source_len + 1)
        _check_tables("cross_tables", batch.cross_tables, batch.source_lens, bounds.num_blocks)
    _within("picks", sampling.picks, tokens)
    edit_counts = np.diff(sampling.edit_offsets)
    if sampling.edit_offsets[0] != 0 or (len(edit_counts) and edit_counts.min() < 0):
        raise ValueError(f"edit_offsets {sampling.edit_offsets.tolist()} must start at 0 and never fall")
    num_edits = int(sampling.edit_offsets[-1])
    if num_edits > min(len(sampling.edit_ids), len(sampling.edit_values)):
        raise ValueError(f"edit_offsets end at {num_edits}; there are {len(sampling.edit_ids)} edits")
    _within("edit_ids", sampling.edit_ids[:num_edits], bounds.vocab_size)
    _within("forced_id", sampling.ints("forced_id") + 1, bounds.vocab_size + 1)


def _ends(batch: DecodeBatch) -> NDArray[np.int32]:
    """Return the number of positions that each row has after the step."""
    ends: NDArray[np.int32] = np.maximum.reduceat(batch.positions, batch.offsets[:-1]) + np.int32(1)
    return ends


def _within(name: str, values: NDArray[np.generic], end: int) -> None:
    if len(values) and (values.min() < 0 or values.max() >= end):
        raise ValueError(f"{name} are {values.min()} to {values.max()}; they must be 0 to {end - 1}")


def _check_tables(name: str, tables: NDArray[np.int32], lengths: NDArray[np.int32], num_blocks: int) -> None:
    """Check the entries of the blocks that each row uses; entries behind them are not used."""
    used = -(-lengths // BLOCK_SIZE)
    if used.max() > tables.shape[1]:
        raise ValueError(f"{name} have {tables.shape[1]} columns; {lengths.max()} positions need {used.max()}")
    entries = tables[np.arange(tables.shape[1]) < used[:, None]]
    _within(name, entries, num_blocks)
