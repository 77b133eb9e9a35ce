"""A fake model, a fake clock and builders of requests, for tests of everything around a model.

The fake model computes: it keeps a cache for each row, checks that it is used as the runner's contract says, and
its next token is a pure function of source and position, so the right answer of any request is known beforehand.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.service import sampler
from antiphon.service.kv_cache import blocks_for, blocks_of_longest
from antiphon.service.request import FinishReason, Request, SamplingParams, TokenEvent
from antiphon.service.runner import DecodeBatch, Draw, EncodeReport

BOS_ID = 1
EOS_ID = 2
FIRST_WORD_ID = 4
WORKSPACE_BYTES_PER_TOKEN = 100


class FakeClock:
    """Seconds that pass when told to."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class FakeRunner:
    """A model whose first source token says how many tokens precede the end token; the rest look random.

    What it caches lies twice, by row and in blocks, and both must agree with what it is asked.

    before_encode, before_decode, before_move: called first, to hold a step or to raise a fault.
    overrides: rows of logits, by source, that take the place of the computed ones at every position.
    encoded, decoded_rows, decoded_tokens: what each call was given, oldest first.
    """

    bos_id = BOS_ID
    eos_id = EOS_ID
    cache_bytes_per_token = 64

    def __init__(
        self,
        *,
        max_rows: int = 8,
        vocab_size: int = 64,
        max_source_len: int = 32,
        max_target_len: int = 32,
        block_size: int = 16,
        num_blocks: int | None = None,
    ) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.max_source_len = max_source_len
        self.max_target_len = max_target_len
        self.block_size = block_size
        self.num_blocks = num_blocks or max_rows * blocks_of_longest(max_source_len, max_target_len, block_size)
        self.before_encode: Callable[[Sequence[Sequence[int]]], None] = lambda sources: None
        self.before_decode: Callable[[int], None] = lambda num_rows: None
        self.before_move: Callable[[], None] = lambda: None
        self.overrides: dict[tuple[int, ...], NDArray[np.float32]] = {}
        self.encoded: list[list[tuple[int, ...]]] = []
        self.decoded_rows: list[int] = []
        self.decoded_tokens: list[int] = []
        self._cells = np.full((self.num_blocks, block_size), -1, np.int64)
        self._sources: list[tuple[int, ...]] = [()] * max_rows
        self._targets: list[list[int]] = [[] for _ in range(max_rows)]

    def encode(
        self, sources: Sequence[Sequence[int]], first_row: int, block_tables: Sequence[Sequence[int]]
    ) -> EncodeReport:
        self.before_encode(sources)
        _require(0 <= first_row <= self.max_rows - len(sources), f"rows from {first_row} do not exist")
        for row, (source, table) in enumerate(zip(sources, block_tables, strict=True), first_row):
            _require(len(table) == blocks_for(len(source), self.block_size), f"row {row} has {len(table)} blocks")
            self._sources[row] = tuple(source)
            self._targets[row] = []
            for position, token_id in enumerate(source):
                self._write(table, position, token_id)
        self.encoded.append([tuple(source) for source in sources])
        return self._report([len(source) for source in sources])

    def decode(self, batch: DecodeBatch) -> Draw:
        num_rows = batch.num_rows
        self.before_decode(num_rows)
        _require(num_rows == len(batch.offsets) - 1 == len(batch.seeds) <= self.max_rows, "arrays of unequal length")
        _require(batch.offsets[0] == 0 and batch.offsets[-1] == batch.num_tokens, "offsets that miss tokens")
        self.decoded_rows.append(num_rows)
        self.decoded_tokens.append(batch.num_tokens)
        logits = np.empty((num_rows, self.vocab_size), np.float32)
        for row in range(num_rows):
            for index in range(batch.offsets[row], batch.offsets[row + 1]):
                self._feed(batch, row, int(batch.token_ids[index]), int(batch.positions[index]))
            logits[row] = self.logits(self._sources[row], len(self._targets[row]) - 1)
        return sampler.sample(logits, batch)

    def move_row(self, source: int, target: int, self_len: int, source_len: int) -> None:
        self.before_move()
        _require(self_len == len(self._targets[source]), f"row {source} caches {len(self._targets[source])} tokens")
        _require(source_len == len(self._sources[source]), f"row {source} has a source of {len(self._sources[source])}")
        self._sources[target] = self._sources[source]
        self._targets[target] = self._targets[source]
        self._sources[source], self._targets[source] = (), []

    def _feed(self, batch: DecodeBatch, row: int, token_id: int, position: int) -> None:
        source, target = self._sources[row], self._targets[row]
        _require(batch.source_lens[row] == len(source), f"row {row} holds a source of {len(source)} tokens")
        cached = [self._read(batch.cross_tables[row], index) for index in range(len(source))]
        _require(cached == list(source), f"row {row} has source {cached} in its blocks, not {source}")
        _require(position == len(target) < self.max_target_len, f"row {row} caches {len(target)} tokens")
        _require((token_id == BOS_ID) == (position == 0), f"row {row} is fed {token_id} after {position} tokens")
        if target:
            last = self._read(batch.self_tables[row], position - 1)
            _require(last == target[-1], f"row {row} has {last} in its blocks after {target}")
        self._write(batch.self_tables[row], position, token_id)
        target.append(token_id)

    def _read(self, table: Sequence[int] | NDArray[np.int32], position: int) -> int:
        return int(self._cells[table[position // self.block_size], position % self.block_size])

    def _write(self, table: Sequence[int] | NDArray[np.int32], position: int, token_id: int) -> None:
        self._cells[table[position // self.block_size], position % self.block_size] = token_id

    def logits(self, source: Sequence[int], position: int) -> NDArray[np.float32]:
        """The row of logits of a source at a target position."""
        if (override := self.overrides.get(tuple(source))) is not None:
            return override
        seed = zlib.crc32(repr((tuple(source), position)).encode())
        row = np.random.default_rng(seed).standard_normal(self.vocab_size).astype(np.float32)
        row[:FIRST_WORD_ID] = -np.inf
        if position >= source[0]:
            row[EOS_ID] = 100.0
        return row

    def answer(
        self, source: Sequence[int], max_new_tokens: int | None = None, *, prefix_len: int = 0
    ) -> tuple[list[int], FinishReason]:
        """Greedy output for a source after a prefix, worked out alone and without a cache."""
        room = self.max_target_len - prefix_len
        limit = min(max_new_tokens or room, room)
        tokens: list[int] = []
        for position in range(prefix_len, prefix_len + limit):
            token_id = int(self.logits(source, position).argmax())
            if token_id == EOS_ID:
                return tokens, FinishReason.STOP
            tokens.append(token_id)
        return tokens, FinishReason.LENGTH

    def _report(self, lengths: Sequence[int]) -> EncodeReport:
        num_tokens = sum(lengths)
        return EncodeReport(
            rows=len(lengths),
            num_tokens=num_tokens,
            longest=max(lengths),
            peak_workspace_bytes=WORKSPACE_BYTES_PER_TOKEN * num_tokens,
            predicted_fused_bytes=0.5 * WORKSPACE_BYTES_PER_TOKEN * num_tokens,
            predicted_materialised_bytes=4 * sum(length**2 for length in lengths),
        )


def source_of(*, target_len: int, length: int = 3, variant: int = 0) -> tuple[int, ...]:
    """A source of `length` tokens that the fake model answers with `target_len` tokens and the end token."""
    body = tuple(FIRST_WORD_ID + (variant * 7 + i) % 50 for i in range(length - 2))
    return (target_len, *body, EOS_ID) if length > 1 else (target_len,)


def request_of(
    request_id: str,
    source: tuple[int, ...],
    *,
    params: SamplingParams | None = None,
    arrival_s: float = 0.0,
    deadline_s: float | None = None,
    prefix: tuple[int, ...] = (),
) -> Request:
    """A greedy request unless params say otherwise."""
    return Request(
        request_id=request_id,
        source_ids=source,
        params=params or SamplingParams(),
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        prefix_ids=prefix,
    )


def tokens_of(events: Iterable[TokenEvent]) -> list[int]:
    """All tokens of a request's events, joined."""
    return [token_id for event in events for token_id in event.token_ids]


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise AssertionError(f"the runner was misused: {complaint}")
