"""Random segmentations of byte-level BPE: tokens replaced by the two tokens from which a merge made them.

BPE-dropout (Provilkov et al. 2020) leaves out merges while a text is segmented, with the tokenizer library's own random
numbers, which have no seed. Splitting what was segmented needs no text, works on a whole epoch at once, and depends on
the seed alone. A model that sees "Table" also as "Tab" + "le" learns what a rare word has in common with its parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.text.tokenizer import Tokenizer


class TokenSplitter:
    """Splits tokens of one tokenizer. Each token is split with probability `rate`, and so are its parts."""

    def __init__(self, tokenizer: Tokenizer, rate: float) -> None:
        self._rate = rate
        self._left = np.full(tokenizer.vocab_size, -1)
        self._right = np.full(tokenizer.vocab_size, -1)
        for merged, left, right in tokenizer.merges():
            self._left[merged], self._right[merged] = left, right

    def split(self, rows: Sequence[Sequence[int]], seed: int) -> list[list[int]]:
        """Return rows of token ids of the same texts with some tokens split."""
        chance = np.random.default_rng(seed)
        ids = np.fromiter((token for row in rows for token in row), dtype=np.int64)
        row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        is_open = np.ones(len(ids), dtype=bool)  # parts of a token that was not split stay whole
        while is_open.any():
            is_open &= (self._left[ids] >= 0) & (chance.random(len(ids)) < self._rate)
            ids, row_of, is_open = self._split_once(ids, row_of, is_open)
        ends = np.searchsorted(row_of, np.arange(len(rows)), side="right")
        return [part.tolist() for part in np.split(ids, ends[:-1])] if rows else []

    def _split_once(
        self, ids: NDArray[np.int64], row_of: NDArray[np.int64], is_split: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        times = np.where(is_split, 2, 1)
        second = np.cumsum(times)[is_split] - 1
        longer = np.repeat(ids, times)
        longer[second - 1] = self._left[ids[is_split]]
        longer[second] = self._right[ids[is_split]]
        return longer, np.repeat(row_of, times), np.repeat(is_split, times)
