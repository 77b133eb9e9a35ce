"""A fake model, a fake clock and builders of requests, for tests of everything around a model.

The fake model computes: it keeps a cache for each row, checks that it is used as the runner's contract says, and
its next token is a pure function of source and position, so the right answer of any request is known beforehand.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from antiphon.service.request import FinishReason, Request, SamplingParams, TokenEvent
from antiphon.service.runner import EncodeReport

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

    before_encode, before_decode, before_move: called first, to hold a step or to raise a fault.
    overrides: rows of logits, by source, that take the place of the computed ones at every position.
    encoded, decoded_rows: what each call was given, oldest first.
    """

    bos_id = BOS_ID
    eos_id = EOS_ID
    cache_bytes_per_token = 64

    def __init__(
        self, *, max_rows: int = 8, vocab_size: int = 64, max_source_len: int = 32, max_target_len: int = 32
    ) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.max_source_len = max_source_len
        self.max_target_len = max_target_len
        self.before_encode: Callable[[Sequence[Sequence[int]]], None] = lambda sources: None
        self.before_decode: Callable[[int], None] = lambda num_rows: None
        self.before_move: Callable[[], None] = lambda: None
        self.overrides: dict[tuple[int, ...], NDArray[np.float32]] = {}
        self.encoded: list[list[tuple[int, ...]]] = []
        self.decoded_rows: list[int] = []
        self._sources: list[tuple[int, ...]] = [()] * max_rows
        self._targets: list[list[int]] = [[] for _ in range(max_rows)]

    def encode(self, sources: Sequence[Sequence[int]], first_row: int) -> EncodeReport:
        self.before_encode(sources)
        lengths = {len(source) for source in sources}
        _require(len(lengths) == 1, f"sources of lengths {lengths} in one encoder run")
        _require(0 <= first_row <= self.max_rows - len(sources), f"rows from {first_row} do not exist")
        for row, source in enumerate(sources, first_row):
            self._sources[row] = tuple(source)
            self._targets[row] = []
        self.encoded.append([tuple(source) for source in sources])
        return self._report(len(sources), lengths.pop())

    def decode(
        self, token_ids: NDArray[np.int64], past_lens: NDArray[np.int32], source_lens: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        self.before_decode(len(token_ids))
        _require(len(token_ids) == len(past_lens) == len(source_lens) <= self.max_rows, "arrays of unequal length")
        self.decoded_rows.append(len(token_ids))
        logits = np.empty((len(token_ids), self.vocab_size), np.float32)
        for row, (token_id, past_len) in enumerate(zip(token_ids.tolist(), past_lens.tolist(), strict=True)):
            source, target = self._sources[row], self._targets[row]
            _require(source_lens[row] == len(source), f"row {row} holds a source of {len(source)} tokens")
            _require(past_len == len(target) < self.max_target_len, f"row {row} caches {len(target)} tokens")
            _require((token_id == BOS_ID) == (past_len == 0), f"row {row} is fed {token_id} after {past_len} tokens")
            target.append(token_id)
            logits[row] = self.logits(source, past_len)
        return logits

    def move_row(self, source: int, target: int, self_len: int, source_len: int) -> None:
        self.before_move()
        _require(self_len == len(self._targets[source]), f"row {source} caches {len(self._targets[source])} tokens")
        _require(source_len == len(self._sources[source]), f"row {source} has a source of {len(self._sources[source])}")
        self._sources[target] = self._sources[source]
        self._targets[target] = self._targets[source]
        self._sources[source], self._targets[source] = (), []

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

    def answer(self, source: Sequence[int], max_new_tokens: int | None = None) -> tuple[list[int], FinishReason]:
        """Greedy output for a source, worked out alone and without a cache."""
        limit = min(max_new_tokens or self.max_target_len, self.max_target_len)
        tokens: list[int] = []
        for position in range(limit):
            token_id = int(self.logits(source, position).argmax())
            if token_id == EOS_ID:
                return tokens, FinishReason.STOP
            tokens.append(token_id)
        return tokens, FinishReason.LENGTH

    def _report(self, rows: int, length: int) -> EncodeReport:
        return EncodeReport(
            rows=rows,
            length=length,
            peak_workspace_bytes=WORKSPACE_BYTES_PER_TOKEN * rows * length,
            predicted_fused_bytes=0.5 * WORKSPACE_BYTES_PER_TOKEN * rows * length,
            predicted_materialised_bytes=4 * rows * length * length,
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
) -> Request:
    """A greedy request unless params say otherwise."""
    return Request(
        request_id=request_id,
        source_ids=source,
        params=params or SamplingParams(),
        arrival_s=arrival_s,
        deadline_s=deadline_s,
    )


def tokens_of(events: Iterable[TokenEvent]) -> list[int]:
    """All tokens of a request's events, joined."""
    return [token_id for event in events for token_id in event.token_ids]


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise AssertionError(f"the runner was misused: {complaint}")
