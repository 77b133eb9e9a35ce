"""Fake model, fake clock and builders of requests, for tests without a real model.

The fake model reads earlier tokens of a row from the row's cache blocks, and raises if the runner's contract is broken.
Its next token is a pure function of source and position (or of source and target), so the correct answer to every
request is known in advance.
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.heads import HeadConfig
from antiphon.architecture.heads import Task as HeadTask
from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import Arrival, FinishReason, Request, Task, TokenEvent
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.sequence import SequenceGroup
from antiphon.engine.stream import OutputStream
from antiphon.ops.cache_geometry import blocks_for
from antiphon.ops.sampling import SamplingArrays, sample
from antiphon.runtime.runner import DecodeBatch, EncodeReport, ModelFacts, Runner, Samples

_R = TypeVar("_R", bound=Request)

BOS_ID = 1
EOS_ID = 2
FIRST_WORD_ID = 4
MEMORY_WIDTH = 4
WORKSPACE_BYTES_PER_TOKEN = 100

Table = Sequence[int] | NDArray[np.int32]


def limits_for(runner: Runner, **changes: Any) -> EngineLimits:
    """Return limits of an engine that uses all rows of a runner and has no limit of the expected wait."""
    return dataclasses.replace(EngineLimits(max_num_seqs=runner.facts.max_rows, max_queue_time_s=None), **changes)


class FakeClock:
    """Clock whose time advances only by calls."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class FakeRunner:
    """A model whose first source token is the number of tokens before the end token; the tokens look random.

    A decoder-only model must set reads_history; its end token is pseudo-random.

    before_encode, before_decode: called first, to hold a step or to raise a fault.
    reads_history: the logits depend on the whole target so far, and the end token can come earlier: for beams.
    leaves_joining: leave rows to the step after the one in which they join, if they feed one token each and are no
        beams, as a runner does that has launched the step already.
    is_recurrent: a block has room for the longest target, like a state of constant size.
    overrides: rows of logits, by source, that replace the computed ones at every position.
    begin_id: first token of every target.
    encoded, decoded_rows, decoded_tokens: arguments of each call, oldest first.
    """

    def __init__(
        self,
        *,
        max_rows: int = 8,
        vocab_size: int = 64,
        max_source_len: int = 32,
        max_target_len: int = 32,
        block_size: int = 16,
        num_blocks: int | None = None,
        is_recurrent: bool = False,
        reads_history: bool = False,
        has_encoder: bool = True,
        has_decoder: bool = True,
        heads: Mapping[HeadTask, HeadConfig] | None = None,
    ) -> None:
        target_block_size = max_target_len if is_recurrent else block_size
        longest = blocks_for(max_source_len if has_encoder else 0, block_size)
        longest += blocks_for(max_target_len, target_block_size)
        self.facts = ModelFacts(
            max_rows=max_rows,
            vocab_size=vocab_size,
            source_vocab_size=vocab_size,
            max_source_len=max_source_len,
            max_target_len=max_target_len,
            has_encoder=has_encoder,
            has_decoder=has_decoder,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            block_size=block_size,
            target_block_size=target_block_size,
            num_blocks=(num_blocks or max_rows * longest) if has_decoder else 0,
            cache_bytes_per_token=64,
            heads=heads or {},
        )
        self.reads_history = reads_history
        self.leaves_joining = False
        self.begin_id = BOS_ID
        self.before_encode: Callable[[Sequence[Sequence[int]]], None] = lambda sources: None
        self.before_decode: Callable[[int], None] = lambda num_rows: None
        self.overrides: dict[tuple[int, ...], NDArray[np.float32]] = {}
        self.encoded: list[list[tuple[int, ...]]] = []
        self.decoded_rows: list[int] = []
        self.decoded_tokens: list[int] = []
        self.num_cache_frees = 0
        self._cells = _Cells(self.facts.num_blocks, max(block_size, target_block_size))

    def sibling(self) -> FakeRunner:
        """Return a runner of another lane: the same model over the same cache blocks, with records of its own."""
        other = copy.copy(self)
        other.encoded, other.decoded_rows, other.decoded_tokens = [], [], []
        return other

    def encode(
        self,
        sources: Sequence[Sequence[int]],
        block_tables: Sequence[Sequence[int]],
        *,
        type_ids: Sequence[Sequence[int]] = (),
        keep_memory: bool = False,
    ) -> EncodeReport:
        _require(self.facts.has_encoder, "it encodes nothing")
        self.before_encode(sources)
        for source, types in zip(sources, type_ids, strict=False):
            _require(len(types) in (0, len(source)), f"{len(types)} token types for {len(source)} tokens")
        for index, (source, table) in enumerate(zip(sources, block_tables, strict=True)):
            if not self.facts.has_decoder:
                _require(not table, f"source {index} has blocks for nothing")
                continue
            num_blocks = blocks_for(len(source), self.facts.block_size)
            _require(len(table) == num_blocks, f"source {index} has {len(table)} blocks")
            mark = _mark(0, len(source))
            for position, token_id in enumerate(source):
                mark = self._cells.write(table, position, token_id, mark, self.facts.block_size)
        self.encoded.append([tuple(source) for source in sources])
        return self._report(sources, keep_memory=keep_memory)

    def run_head(self, task: HeadTask, states: NDArray[np.float32]) -> NDArray[np.float32]:
        _require(task in self.facts.heads, f"there is no {task} head")
        _require(states.ndim == 2 and len(states) > 0, f"states of shape {states.shape}")
        return self.head_outputs(task, states)

    def head_outputs(self, task: HeadTask, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return outputs [K, O] of a head for states [K, MEMORY_WIDTH]; the head's labels, or the task, determine O."""
        widths = {"fill_mask": self.facts.vocab_size, "pool": MEMORY_WIDTH}
        width = widths.get(task) or len(self.facts.heads[task].labels)
        weights = np.sin(np.arange(MEMORY_WIDTH * width, dtype=np.float32)).reshape(MEMORY_WIDTH, width)
        return np.stack([row @ weights for row in states])

    def decode(self, batch: DecodeBatch) -> Samples:
        _require(self.facts.has_decoder, "it decodes nothing")
        num_rows = batch.num_rows
        self.before_decode(num_rows)
        _require(num_rows == len(batch.offsets) - 1 <= self.facts.max_rows, "arrays of unequal length")
        _require(batch.offsets[0] == 0 and batch.offsets[-1] == batch.num_tokens, "offsets that miss tokens")
        _check_sampling(batch)
        self._check_sharing(batch)
        if self.leaves_joining and batch.num_due and _are_plain(batch):
            num_rows = batch.num_due
            batch = batch.part(0, num_rows)
        self.decoded_rows.append(num_rows)
        self.decoded_tokens.append(batch.num_tokens)
        picks = batch.sampling.picks
        logits = np.empty((len(picks), self.facts.vocab_size), np.float32)
        for row in range(num_rows):
            source, history, mark = self._past(batch, row)
            for index in range(batch.offsets[row], batch.offsets[row + 1]):
                mark = self._feed(batch, row, index, history, mark)
                if (held := np.flatnonzero(picks == index)).size:
                    logits[held] = self.logits_after(source, history)
        return sample(logits, batch.sampling, batch.positions[picks])

    def free_cache(self) -> None:
        self.num_cache_frees += 1
        self._cells.clear()

    def copy_blocks(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        _require(len(sources) == len(targets) == len(set(targets.tolist())), f"blocks copied to {targets.tolist()}")
        _require(not {*sources.tolist()} & {*targets.tolist()}, "a block is both source and target of a copy")
        self._cells.copy(sources, targets)

    def _past(self, batch: DecodeBatch, row: int) -> tuple[tuple[int, ...], list[int], int]:
        """Return a row's source and target so far, read from its blocks, and the mark of both."""
        source_len = int(batch.source_lens[row])
        source, mark = self._cells.read(
            batch.cross_tables[row], source_len, _mark(0, source_len), self.facts.block_size
        )
        past_len = int(batch.positions[batch.offsets[row]])
        history, mark = self._cells.read(batch.self_tables[row], past_len, mark, self.facts.target_block_size)
        return tuple(source), history, mark

    def _feed(self, batch: DecodeBatch, row: int, index: int, history: list[int], mark: int) -> int:
        token_id, position = int(batch.token_ids[index]), int(batch.positions[index])
        _require(position == len(history) < self.facts.max_target_len, f"row {row} caches {len(history)} tokens")
        is_begun = (token_id == self.begin_id) == (position == 0) or not self.facts.has_encoder
        _require(is_begun, f"row {row} is fed {token_id} after {position} tokens")
        history.append(token_id)
        return self._cells.write(batch.self_tables[row], position, token_id, mark, self.facts.target_block_size)

    def _check_sharing(self, batch: DecodeBatch) -> None:
        """Require that no row uses a block that another writes."""
        uses: Counter[int] = Counter()
        written: list[int] = []
        for row in range(batch.num_rows):
            first = int(batch.positions[batch.offsets[row]]) // self.facts.target_block_size
            end = blocks_for(int(batch.positions[batch.offsets[row + 1] - 1]) + 1, self.facts.target_block_size)
            num_cross = blocks_for(int(batch.source_lens[row]), self.facts.block_size)
            written += batch.self_tables[row, first:end].tolist()
            uses.update(batch.self_tables[row, :end].tolist() + batch.cross_tables[row, :num_cross].tolist())
        shared = [block for block in written if uses[block] > 1]
        _require(not shared, f"blocks {shared} are written by one row and used by another")

    def logits_after(self, source: Sequence[int], history: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits of a source after a target, its begin token included."""
        position = len(history) - 1
        if not self.reads_history or tuple(source) in self.overrides:
            return self.logits(source, position)
        row = self._random_logits((tuple(source), tuple(history)))
        row[:EOS_ID] = row[EOS_ID + 1 : FIRST_WORD_ID] = -np.inf
        if source and position >= source[0]:
            row[EOS_ID] = 100.0
        return row

    def logits(self, source: Sequence[int], position: int) -> NDArray[np.float32]:
        """Return the logits of a source at a target position, if they do not depend on the target."""
        if (override := self.overrides.get(tuple(source))) is not None:
            return override
        row = self._random_logits((tuple(source), position))
        row[:FIRST_WORD_ID] = -np.inf
        if source and position >= source[0]:
            row[EOS_ID] = 100.0
        return row

    def answer(
        self, source: Sequence[int], max_new_tokens: int | None = None, *, prefix_len: int = 0
    ) -> tuple[list[int], FinishReason]:
        """Return the greedy output for a source after a prefix, computed alone, if the model ignores its history."""
        room = self.facts.max_target_len - prefix_len
        limit = min(max_new_tokens or room, room)
        tokens: list[int] = []
        for position in range(prefix_len, prefix_len + limit):
            token_id = int(self.logits(source, position).argmax())
            if token_id == EOS_ID:
                return tokens, FinishReason.STOP
            tokens.append(token_id)
        return tokens, FinishReason.LENGTH

    def memory(self, source: Sequence[int]) -> NDArray[np.float32]:
        """Return the encoder's states [S, MEMORY_WIDTH] of a source."""
        return np.asarray(np.sin(np.outer(source, np.arange(1, 1 + MEMORY_WIDTH))), np.float32)

    def _random_logits(self, key: tuple[object, ...]) -> NDArray[np.float32]:
        generator = np.random.default_rng(zlib.crc32(repr(key).encode()))
        return generator.standard_normal(self.facts.vocab_size).astype(np.float32)

    def _report(self, sources: Sequence[Sequence[int]], *, keep_memory: bool) -> EncodeReport:
        lengths = [len(source) for source in sources]
        num_tokens = sum(lengths)
        return EncodeReport(
            rows=len(lengths),
            num_tokens=num_tokens,
            longest=max(lengths),
            peak_workspace_bytes=WORKSPACE_BYTES_PER_TOKEN * num_tokens,
            predicted_fused_bytes=0.5 * WORKSPACE_BYTES_PER_TOKEN * num_tokens,
            predicted_materialised_bytes=4 * sum(length**2 for length in lengths),
            memory=np.concatenate([self.memory(source) for source in sources]) if keep_memory else None,
        )


class _Cells:
    """Cache blocks of tokens. Each cell has a mark that depends on all earlier tokens, like a key in a real cache.

    The mark identifies a cell that another row or an earlier owner of the block wrote.
    """

    def __init__(self, num_blocks: int, capacity: int) -> None:
        self._tokens = np.full((num_blocks, capacity), -1, np.int64)
        self._marks = np.zeros((num_blocks, capacity), np.int64)

    def read(self, table: Table, length: int, mark: int, block_size: int) -> tuple[list[int], int]:
        """Return the first `length` tokens of a table and the mark of the last. mark: of the tokens before it."""
        token_ids = []
        for position in range(length):
            cell = self._cell(table, position, block_size)
            token_ids.append(int(self._tokens[cell]))
            mark = _mark(mark, token_ids[-1])
            _require(mark == self._marks[cell], f"block {cell[0]} does not hold position {position} after {token_ids}")
        return token_ids, mark

    def write(self, table: Table, position: int, token_id: int, mark: int, block_size: int) -> int:
        """Write a token after the tokens with the mark `mark`; return its mark."""
        cell = self._cell(table, position, block_size)
        self._tokens[cell] = token_id
        self._marks[cell] = mark = _mark(mark, token_id)
        return mark

    def clear(self) -> None:
        self._tokens.fill(-1)
        self._marks.fill(0)

    def copy(self, sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        for array in (self._tokens, self._marks):
            array[targets] = array[sources]

    def _cell(self, table: Table, position: int, block_size: int) -> tuple[int, int]:
        block = int(table[position // block_size])
        _require(0 <= block < len(self._tokens), f"block {block} does not exist")
        return block, position % block_size


def _mark(before: int, token_id: int) -> int:
    return zlib.crc32(token_id.to_bytes(8, "little", signed=True), before)


def _are_plain(batch: DecodeBatch) -> bool:
    """Return whether every row feeds and samples one token, without edits, and none is a beam."""
    has_one_each = batch.num_tokens == batch.num_rows == len(batch.sampling)
    return bool(
        has_one_each and batch.sampling.edit_offsets[-1] == 0 and not batch.sampling.ints("is_normalized").any()
    )


def _check_sampling(batch: DecodeBatch) -> None:
    sampling = batch.sampling
    lengths = {len(getattr(sampling, name)) for name in SamplingArrays.__slots__ if not name.startswith("edit_")}
    _require(lengths == {len(sampling.edit_offsets) - 1}, "sampling parameters of unequal length")
    _require(
        bool(((sampling.picks >= 0) & (sampling.picks < batch.num_tokens)).all()), f"picks {sampling.picks.tolist()}"
    )
    _require(bool((np.diff(sampling.edit_offsets) >= 0).all()), f"edit_offsets {sampling.edit_offsets.tolist()}")
    num_edits = int(sampling.edit_offsets[-1])
    num_values = len(sampling.edit_values) or num_edits  # no values: all edits are neutral
    _require(num_edits <= min(len(sampling.edit_ids), num_values), f"{num_edits} edits are not there")
    width = max(0, int(sampling.ints("num_logprobs").max(initial=0)))
    _require(batch.max_num_logprobs == width, f"max_num_logprobs is {batch.max_num_logprobs}, not {width}")


def source_of(*, target_len: int, length: int = 3, variant: int = 0) -> tuple[int, ...]:
    """Return a source of `length` tokens that the fake model answers with `target_len` tokens and the end token."""
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
    """Return a request to generate, greedy by default."""
    return Request(
        task=Task.GENERATE,
        is_streamed=True,
        arrival=Arrival(request_id=request_id, arrival_s=arrival_s, deadline_s=deadline_s),
        source_ids=source,
        params=params or SamplingParams(),
        prefix_ids=prefix,
    )


def changed(request: _R, **changes: Any) -> _R:
    """Return a copy with other values of some fields, those of its arrival included."""
    names = {field.name for field in dataclasses.fields(Arrival)}
    arrival = {name: value for name, value in changes.items() if name in names}
    rest = {name: value for name, value in changes.items() if name not in names}
    return dataclasses.replace(request, arrival=dataclasses.replace(request.arrival, **arrival), **rest)


def scored(request: Request, target_ids: Sequence[int], *, name: str | None = None) -> Request:
    """Return a request to score a target after the source and prefix of a request to generate."""
    arrival = request.arrival
    return Request(
        task=Task.SCORE,
        arrival=arrival if name is None else dataclasses.replace(arrival, request_id=name),
        source_ids=request.source_ids,
        begin_id=request.begin_id,
        prefix_ids=request.prefix_ids,
        num_prompt_ids=request.num_prompt_ids,
        target_ids=tuple(target_ids),
        num_alternatives=request.num_logprobs or 0,
    )


def stream_of(group: SequenceGroup) -> OutputStream:
    """Return the stream of a request, whose reader is in this process."""
    assert isinstance(group.stream, OutputStream)
    return group.stream


def tokens_of(events: Iterable[TokenEvent]) -> list[int]:
    """Return all tokens of a request's events, joined."""
    return [token_id for event in events for token_id in event.token_ids]


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise AssertionError(f"the runner was misused: {complaint}")
