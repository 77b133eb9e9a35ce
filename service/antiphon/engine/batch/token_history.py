"""Tokens that the rows have fed, so that a preempted row can feed them again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class TokenHistory:
    """Target tokens of max_rows rows by position.

    width: target positions whose tokens are kept; 0 keeps nothing.
    """

    def __init__(self, max_rows: int, width: int) -> None:
        self.token_ids: NDArray[np.int32] = np.zeros((max_rows, width), np.int32)
        self._is_kept = width > 0
        self._rows: NDArray[np.int32] = np.arange(max_rows, dtype=np.int32)

    def fill(self, row: int, token_ids: tuple[int, ...]) -> None:
        """Set the first tokens of a row that starts."""
        if self._is_kept:
            self.token_ids[row, : len(token_ids)] = token_ids

    def push(self, positions: NDArray[np.int32], token_ids: NDArray[np.int64]) -> None:
        """Set the token of each of the first rows at its position."""
        if self._is_kept:
            self.token_ids[self._rows[: len(positions)], positions] = token_ids

    def of(self, row: int, begin: int, end: int) -> tuple[int, ...]:
        """Return the tokens of a row at positions begin .. end-1."""
        return tuple(self.token_ids[row, begin:end].tolist())
