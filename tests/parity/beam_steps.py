"""Random steps of beam searches through `SearchArrays`, compared with NumPy and with a cache of tokens.

As a program, it makes them with another native library: `python -m tests.parity.beam_steps LIBRARY --rounds 24`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.ops.beam_step import NONE, Ended, EngineRows, SearchArrays
from antiphon.ops.workspace import LIBRARY

DEAD = np.float32(-1e9)
WORDS = 40


class Steps:
    """Searches of one shape over rows in random order. Every row writes the tokens that it feeds into its blocks."""

    def __init__(self, seed: int, library: Path) -> None:
        self.dice = dice = np.random.default_rng(seed)
        self.width, self.num_searches, self.max_len = int(dice.integers(2, 7)), int(dice.integers(1, 5)), 20
        num_end_ids, self.block_size = int(dice.integers(1, 4)), int(dice.integers(2, 6))
        self.num_candidates = self.width * (1 + num_end_ids)
        self.arrays = SearchArrays(self.width, self.num_candidates, self.max_len, library=library)
        self.arrays.reserve(self.num_searches)
        num_rows, num_columns = self.num_searches * self.width + 2, self.max_len // self.block_size + 2
        self.rows = dice.permutation(num_rows)[:-2].reshape(self.num_searches, self.width)
        self.token_ids: NDArray[np.int64] = np.zeros(num_rows, np.int64)
        self.positions: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.tables = dice.permutation(num_rows * num_columns).astype(np.int32).reshape(num_rows, num_columns)
        self.engine = EngineRows(self.token_ids, self.positions, self.tables, self.block_size)
        self.cache: NDArray[np.int64] = np.full((num_rows * num_columns, self.block_size), -1)
        self.fed: list[list[list[int]]] = [[[0]] * self.width for _ in range(self.num_searches)]
        for slot in range(self.num_searches):
            self._start(slot, dice.integers(0, WORDS, num_end_ids))

    def step(self) -> bool:
        """Move every search by one token. Return False once one of them has its longest target."""
        self._feed()
        candidates = self._candidates()
        expected = [self._chosen(slot, candidates) for slot in range(self.num_searches)]
        ended = self.arrays.choose(candidates, self.rows)
        assert ended == [one for *_, of_slot in expected for one in of_slot]
        for slot, (parents, token_ids, scores, logprobs, _) in enumerate(expected):
            assert self.arrays.parents[slot].tolist() == parents
            assert self.arrays.next_ids[slot].tolist() == token_ids
            assert self.arrays.scores[slot].tobytes() == scores.tobytes()
            assert self.arrays.next_logprobs[slot].tobytes() == logprobs.tobytes()
            self.fed[slot] = [
                [*self.fed[slot][parent], token_id] for parent, token_id in zip(parents, token_ids, strict=True)
            ]
        self._remember()
        self._share()
        return not self.arrays.is_over[: self.num_searches].any()

    def _start(self, slot: int, end_ids: NDArray[np.int64]) -> None:
        arrays = self.arrays
        arrays.scores[slot], arrays.scores[slot, 0] = DEAD, 0.0
        arrays.end_ids[slot], arrays.max_lengths[slot] = end_ids, self.dice.integers(1, self.max_len + 1)
        arrays.forced_ids[slot] = self.dice.choice([NONE, 7])
        arrays.num_streamed[slot] = self.dice.choice([NONE, 0])

    def _feed(self) -> None:
        """Write the token of each row into its block. No two beams write into one block."""
        places = [(self.tables[row, self.positions[row] // self.block_size], row) for row in self.rows.ravel()]
        assert len({block for block, _ in places}) == len(places)
        for block, row in places:
            self.cache[block, self.positions[row] % self.block_size] = self.token_ids[row]

    def _candidates(self) -> tuple[NDArray[Any], ...]:
        """Return candidates of every row, best first; many scores are equal, and some candidates are missing."""
        shape = (len(self.token_ids), self.num_candidates + int(self.dice.integers(0, 3)))
        scores = -np.sort(self.dice.integers(0, 12, shape), axis=1).astype(np.float32) / 4
        ids = np.argsort(self.dice.random((shape[0], WORDS)), axis=1)[:, : shape[1]].astype(np.int64)
        is_missing = np.arange(shape[1]) >= self.dice.integers(1, 3 * shape[1], (shape[0], 1))
        scores[is_missing], ids[is_missing] = -np.inf, -1
        return ids, scores, self.dice.normal(size=shape).astype(np.float32)

    def _chosen(
        self, slot: int, candidates: tuple[NDArray[Any], ...]
    ) -> tuple[list[int], list[int], NDArray[np.float32], NDArray[np.float32], list[Ended]]:
        """Return parents, tokens, scores and log-probabilities of the next beams, and the candidates that end."""
        arrays, width = self.arrays, self.width
        ids, scores, logprobs = (array[self.rows[slot], : self.num_candidates].copy() for array in candidates)
        is_first, forced = arrays.lengths[slot] == 0, arrays.forced_ids[slot]
        if is_first and forced != NONE:
            ids[:], scores[:] = -1, -np.inf
            ids[:, 0], scores[:, 0] = forced, 0.0
        totals = (arrays.scores[slot][:, None] + scores).ravel()
        best = np.argsort(-totals, kind="stable")[: self.num_candidates]
        parents, ids, totals, logprobs = (
            best // self.num_candidates,
            ids.ravel()[best],
            totals[best],
            logprobs.ravel()[best],
        )
        is_last = arrays.lengths[slot] + 1 >= arrays.max_lengths[slot]
        is_end = np.isin(ids, arrays.end_ids[slot]) | is_last
        ended = [
            Ended(slot, int(parents[rank]), int(ids[rank]), float(totals[rank]), float(logprobs[rank]))
            for rank in np.flatnonzero(is_end[:width])
        ]
        going = np.argsort(is_end, kind="stable")[:width]
        parents = np.zeros(width, np.int64) if is_first else parents[going]
        return parents.tolist(), np.maximum(ids[going], 0).tolist(), totals[going], logprobs[going], ended

    def _remember(self) -> None:
        agreed = {
            slot: (beam, count) for slot, beam, count in self.arrays.remember(self.num_searches, keeps_logprobs=True)
        }
        for slot, histories in enumerate(self.fed):
            length = int(self.arrays.lengths[slot])
            assert self.arrays.token_ids[slot, :, :length].tolist() == [history[1:] for history in histories]
            known = int(self.arrays.num_streamed[slot])
            alive = [histories[beam][1:] for beam in np.flatnonzero(self.arrays.scores[slot] > DEAD / 2)]
            shared = [tokens[0] for tokens in zip(*alive, strict=True)]
            for index, tokens in enumerate(zip(*alive, strict=True)):
                if len(set(tokens)) > 1:
                    shared = shared[:index]
                    break
            if known == NONE or len(shared) <= known:
                assert slot not in agreed
                continue
            beam, count = agreed[slot]
            assert histories[beam][1 + known : 1 + known + count] == shared[known:]
            self.arrays.num_streamed[slot] = known + int(self.dice.integers(0, count + 1))

    def _share(self) -> None:
        num_cached = self.positions[self.rows] + 1
        shared = self.arrays.share(self.engine, self.rows)
        self.cache[shared.targets] = self.cache[shared.sources]
        assert shared.full == np.flatnonzero(num_cached[:, 0] % self.block_size == 0).tolist()
        for slot, histories in enumerate(self.fed):
            for row, history in zip(self.rows[slot], histories, strict=True):
                assert (self.positions[row], self.token_ids[row]) == (len(history) - 1, history[-1])
                assert self.cache[self.tables[row]].ravel()[: len(history) - 1].tolist() == history[:-1]


def check(seed: int, library: Path = LIBRARY) -> int:
    """Run searches until one of them is over; returns the number of steps."""
    steps, count = Steps(seed, library), 1
    while steps.step():
        count += 1
    return count


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    parser.add_argument("--rounds", type=int, default=24)
    chosen = parser.parse_args()
    print(sum(check(seed, chosen.library) for seed in range(chosen.rounds)), "steps")
