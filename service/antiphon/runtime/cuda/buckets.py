"""Sizes to which steps are padded, so that few graphs are captured and each is replayed often. Pure arithmetic."""

from __future__ import annotations

_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_ROWS_STEP = 64  # above the last
_CANDIDATES = (1, 8, 32)


def row_bucket(num_rows: int, max_rows: int) -> int:
    """Return the number of rows to which a step of num_rows is padded, at most max_rows."""
    for size in _ROWS:
        if num_rows <= size:
            return min(size, max_rows)
    return min(-(-num_rows // _ROWS_STEP) * _ROWS_STEP, max_rows)


def candidate_bucket(num_candidates: int) -> int:
    """Return the number of candidates that a step computes: at least 1, because a tensor has no size of 0."""
    for size in _CANDIDATES:
        if num_candidates <= size:
            return size
    return power_of_two(num_candidates)


def power_of_two(size: int) -> int:
    """Return the next power of two, at least 1."""
    return 1 << max(0, size - 1).bit_length()
