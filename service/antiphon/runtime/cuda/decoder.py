"""Runs decoder steps on a GPU: one copy in, one launch of a captured graph, one copy out; and one step ahead.

A step in which every row feeds and samples one token is padded to a bucket of rows, whose graph is captured when it is
first run and replayed from then on. Other steps (prefixes, targets to be scored) run without a captured graph.

The step after the present one is launched before the present one has been read: its tokens are taken on the device. Of
rows that turn out to have left its results are not used. Rows that join meanwhile wait for the step after it, and are
launched with that one. If one of them needs the host's work, as a prefix does, no row waits: the step ahead is not
used, and all rows step again. What it wrote then belongs to positions that their rows write again, or to blocks that
were freed and are written before they are read, since all work runs in one stream in order. Of the two states of a
recurrence it replaced the one that no later step of its row reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for
from antiphon.ops.cuda import PREVIOUS
from antiphon.ops.cuda.driver import CudaDevice
from antiphon.ops.sampling import Samples, SamplingArrays
from antiphon.runtime.cuda.cuda_graph import Bound, CudaGraph, ElementType
from antiphon.runtime.cuda.step_buffers import StepBuffers, StepSizes, StepTurn, following_params
from antiphon.runtime.runner import DecodeBatch

_FIRST_EDITS = 4096
# Consecutive steps that could have been launched ahead, before the next one is: sooner, it would often be of no use.
_QUIET_STEPS = 2
# Sizes to which steps are padded, so that few graphs are captured and each is replayed often.
_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
_ROWS_STEP = 64  # above the last
_CANDIDATES = (1, 8, 32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """The cache blocks on the device."""

    address: int
    shape: tuple[int, ...]
    element: ElementType


@dataclass(frozen=True, kw_only=True, slots=True)
class _Launched:
    """A step in flight, in which every row feeds and samples one token.

    num_rows: rows without padding.
    """

    turn: StepTurn
    num_rows: int
    sizes: StepSizes
    has_candidates: bool


class CudaDecoder:
    """The decoder graph of a bundle on a device. goes_ahead: launch steps ahead."""

    def __init__(
        self, graph: CudaGraph, device: CudaDevice, pool: Pool, bounds: Bounds, *, goes_ahead: bool = True
    ) -> None:
        self._graph = graph
        self._device = device
        self._pool = pool
        self._bounds = bounds
        self._goes_ahead = goes_ahead
        self._graph_ids = count(1)
        self._captured: dict[tuple[int, int], tuple[int, Bound]] = {}
        rows = bounds.max_rows
        self._fixed = StepBuffers(device, self._sizes(rows, rows, rows, _FIRST_EDITS, candidate_bucket(0)))
        self._free: StepBuffers | None = None
        self._last: _Launched | None = None
        self._ahead: _Launched | None = None
        self._num_quiet = 0
        self._row_of_block = np.zeros(bounds.num_blocks, np.intp)  # scratch: the row that writes to it, or any other
        self.num_ahead = 0  # steps whose results were there before they were asked for

    def run(self, batch: DecodeBatch) -> Samples:
        """Run one step and return its samples: those of the rows that are due, if the others wait for the next step.

        Raises ValueError for a wrong index, GraphError.
        """
        ahead, last, self._ahead = self._ahead, self._last, None
        due, joining = batch, None
        if batch.num_due and last is not None and self._may_wait(last, batch):
            due, joining = batch.part(0, batch.num_due), batch.part(batch.num_due, batch.num_rows)
            check_batch(joining, self._bounds)
        places = None if last is None else self._places(last, ahead, due)
        self._num_quiet = 0 if places is None else self._num_quiet + 1
        if ahead is None or places is None:
            due, joining = batch, None
            check_batch(batch, self._bounds)
            if batch.num_tokens != batch.num_rows or len(batch.sampling) != batch.num_rows:
                self._last = None
                return self._run_once(batch)
            launched, places = self._launch(batch), np.arange(batch.num_rows)
        else:
            self.num_ahead += 1
            launched = ahead
        self._ahead = self._launch_ahead(launched, places, due, joining)
        self._last = launched
        launched.turn.event.wait()
        return launched.turn.samples(places, launched.sizes.candidates, batch.max_num_logprobs)

    def _may_wait(self, last: _Launched, batch: DecodeBatch) -> bool:
        """Return whether the rows of a batch that are not due can be launched with the step after one ahead."""
        has_one_each = batch.num_tokens == batch.num_rows == len(batch.sampling)
        has_candidates = candidate_bucket(batch.max_num_logprobs) <= last.sizes.candidates
        bucket = (row_bucket(batch.num_rows, self._bounds.max_rows), last.sizes.candidates)
        return has_one_each and has_candidates and bucket in self._captured and not _needs_host(batch.sampling)

    def _sizes(self, tokens: int, rows: int, samples: int, edits: int, candidates: int) -> StepSizes:
        bounds = self._bounds
        return StepSizes(
            tokens=tokens,
            rows=rows,
            samples=samples,
            edits=edits,
            candidates=candidates,
            self_width=blocks_for(bounds.max_target_len, bounds.target_block_size),
            cross_width=blocks_for(bounds.max_source_len) if bounds.has_encoder else 0,
        )

    def _launch(self, batch: DecodeBatch) -> _Launched:
        """Launch a step in which every row feeds one token."""
        rows = row_bucket(batch.num_rows, self._bounds.max_rows)
        candidates = candidate_bucket(batch.max_num_logprobs)
        sizes = self._sizes(rows, rows, rows, int(batch.sampling.edit_offsets[-1]), candidates)
        self._hold(sizes)
        turn = self._fixed.next_turn()
        turn.fill(batch, sizes)
        has_candidates = candidates > 1 or batch.max_num_logprobs > 0
        launched = _Launched(turn=turn, num_rows=batch.num_rows, sizes=sizes, has_candidates=has_candidates)
        self._replay(launched)
        return launched

    def _hold(self, sizes: StepSizes) -> None:
        """Make the fixed memory large enough; graphs that were captured with the old one are captured again."""
        if not self._fixed.sizes.holds(sizes):
            grown = self._sizes(1, 1, 1, power_of_two(sizes.edits), sizes.candidates)
            self._device.wait()
            self._fixed = StepBuffers(self._device, self._fixed.sizes.joined(grown))
            self._captured.clear()
            self._last = None

    def _replay(self, launched: _Launched) -> None:
        sizes = launched.sizes
        key = (sizes.rows, sizes.candidates)
        if key not in self._captured:
            self._captured[key] = (next(self._graph_ids), self._bound(self._fixed, sizes))
        graph_id, bound = self._captured[key]
        launched.turn.copy_in()
        self._graph.run(bound, graph_id)
        launched.turn.copy_out(has_candidates=launched.has_candidates)

    def _places(self, last: _Launched, ahead: _Launched | None, batch: DecodeBatch) -> NDArray[np.intp] | None:
        """Return [rows]: the row of the step ahead that each row of a batch is; None if it does not have this batch.

        Without a step ahead, the row of the last step, one position earlier, of which one could have been launched. A
        batch that is found needs no check: its numbers were checked, or are those of an earlier one, one position
        further, with tokens that the device chose. A row is known by the block that it writes to, which no other row
        has.
        """
        step, shift = (last, 1) if ahead is None else (ahead, 0)
        inputs, rows, block_size = step.turn.inputs, step.num_rows, self._bounds.target_block_size
        if batch.num_tokens != batch.num_rows or batch.num_rows > rows or len(batch.sampling) != batch.num_rows:
            return None
        its_positions, positions = inputs["positions"][:rows], batch.positions - np.int32(shift)
        column = positions // block_size
        if column.min() < 0 or column.max() >= batch.self_tables.shape[1]:
            return None
        blocks = inputs["self_tables"][np.arange(rows), its_positions // block_size]
        own = batch.self_tables[np.arange(batch.num_rows), column]
        if own.min() < 0 or own.max() >= self._bounds.num_blocks:
            return None  # it will be refused
        self._row_of_block[blocks] = np.arange(rows)
        places = self._row_of_block[own]
        int_params = inputs["int_params"] if shift == 0 else following_params(inputs["int_params"])
        if places.max() >= rows or not np.array_equal(blocks[places], own):
            return None
        is_same = (
            np.array_equal(its_positions[places], positions)
            and _is_prefix(batch.self_tables, inputs["self_tables"][places])
            and ("cross_lens" not in inputs or np.array_equal(batch.source_lens, inputs["cross_lens"][places]))
            and ("cross_tables" not in inputs or _is_prefix(batch.cross_tables, inputs["cross_tables"][places]))
            and np.array_equal(batch.sampling.float_params, inputs["float_params"][places])
            and np.array_equal(batch.sampling.int_params, int_params[places])
            and batch.sampling.edit_offsets[-1] == 0 == inputs["edit_offsets"][step.sizes.samples]
            and (ahead is None or np.array_equal(batch.token_ids, _fed_ids(last, ahead)[places]))
        )
        return places if is_same else None

    def _launch_ahead(
        self, launched: _Launched, places: NDArray[np.intp], due: DecodeBatch, joining: DecodeBatch | None
    ) -> _Launched | None:
        """Launch the step after one: its rows `places` with the tokens that they sample, and those that join."""
        if not self._goes_ahead or self._num_quiet < _QUIET_STEPS or not _can_go_ahead(due, self._bounds):
            return None
        sizes, num_rows = launched.sizes, len(places) + (0 if joining is None else joining.num_rows)
        rows, has_candidates = row_bucket(num_rows, self._bounds.max_rows), launched.has_candidates
        if (rows, sizes.candidates) in self._captured:  # a capture runs the step again, after its tokens are replaced
            sizes = replace(sizes, tokens=rows, rows=rows, samples=rows)
        turn = self._fixed.next_turn()
        turn.advance(launched.turn, places, joining, sizes.rows)
        has_candidates = has_candidates or (joining is not None and joining.max_num_logprobs > 0)
        ahead = _Launched(turn=turn, num_rows=num_rows, sizes=sizes, has_candidates=has_candidates)
        self._replay(ahead)
        return ahead

    def _run_once(self, batch: DecodeBatch) -> Samples:
        """Run a step of a rare shape without a captured graph: rows with a prefix, or targets to be scored."""
        sizes = self._sizes(
            power_of_two(batch.num_tokens),
            row_bucket(batch.num_rows, self._bounds.max_rows),
            power_of_two(len(batch.sampling)),
            power_of_two(int(batch.sampling.edit_offsets[-1])),
            candidate_bucket(batch.max_num_logprobs),
        )
        if self._free is None or not self._free.sizes.holds(sizes):
            self._device.wait()
            self._free = StepBuffers(self._device, sizes if self._free is None else self._free.sizes.joined(sizes))
        turn = self._free.next_turn()
        turn.fill(batch, sizes)
        turn.copy_in()
        self._graph.run(self._bound(self._free, sizes))
        turn.copy_out(has_candidates=True)
        turn.event.wait()
        return turn.samples(np.arange(len(batch.sampling)), sizes.candidates, batch.max_num_logprobs)

    def _bound(self, buffers: StepBuffers, sizes: StepSizes) -> Bound:
        """Bind the leading part of each array, up to these sizes."""
        bound = self._graph.bind()
        lengths = {"self_tables": sizes.rows, "cross_tables": sizes.rows, "candidates": sizes.candidates}
        lengths |= dict.fromkeys(("tokens", "positions", "rows", "self_lens", "cross_lens"), sizes.tokens)
        lengths |= dict.fromkeys(("picks", "sample_positions", "float_params", "int_params"), sizes.samples)
        lengths["edit_offsets"] = sizes.samples + 1
        for name, place in buffers.inputs:
            shape = (lengths.get(name, place.shape[0]), *place.shape[1:])
            bound.bind_input(name, place.dtype.type, shape, buffers.device_inputs.address + place.offset)
        for name, place in buffers.results:
            shape = (sizes.samples, sizes.candidates) if name.startswith("top_") else (sizes.samples,)
            bound.bind_output(name, place.dtype.type, shape, buffers.device_results.address + place.offset)
        # The tokens that the step before sampled: this step reads them first and replaces them last.
        previous = buffers.device_results.address + buffers.results.places["token_ids"].offset
        bound.bind_input("previous", np.int32, (buffers.sizes.samples,), previous)
        bound.bind_input("cache", self._pool.element, self._pool.shape, self._pool.address)
        return bound


def _can_go_ahead(batch: DecodeBatch, bounds: Bounds) -> bool:
    """Return True if the next step needs neither the host's work on the tokens nor a block that a row may not have."""
    if _needs_host(batch.sampling):
        return False
    following = batch.positions + np.int32(1)
    if batch.num_own is None:
        has_room = following % bounds.target_block_size != 0
    else:
        has_room = following // bounds.target_block_size < batch.num_own
    return bool(has_room.all() and following.max() < bounds.max_target_len)


def _needs_host(sampling: SamplingArrays) -> bool:
    """Return True if the host must see a token before the next step."""
    return bool(sampling.edit_offsets[-1] > 0 or sampling.ints("is_normalized").any())


def _fed_ids(last: _Launched, ahead: _Launched) -> NDArray[np.int32]:
    """Return [rows]: the tokens that a step ahead feeds, once the step before it has ended."""
    fed = ahead.turn.inputs["tokens"][: ahead.num_rows]
    sampled = last.turn.token_ids(last.num_rows)
    return np.where(fed > PREVIOUS, fed, sampled[np.clip(PREVIOUS - fed, 0, last.num_rows - 1)])


def _is_prefix(table: NDArray[np.int32], earlier: NDArray[np.int32]) -> bool:
    return np.array_equal(table, earlier[:, : table.shape[1]])


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Limits of the arrays of a step: everything is below these numbers, or at most max_source_len.

    target_block_size: target tokens of a block.
    """

    max_rows: int
    num_blocks: int
    vocab_size: int
    max_target_len: int
    target_block_size: int
    max_source_len: int
    has_encoder: bool


def check_batch(batch: DecodeBatch, bounds: Bounds) -> None:
    """Raise ValueError, which names the array, the value and the range, for a batch that kernels must not receive.

    No kernel checks an index: a wrong one reads or writes other requests' memory, or ends the process.
    """
    rows, tokens, sampling = batch.num_rows, batch.num_tokens, batch.sampling
    if not 0 < rows <= bounds.max_rows:
        raise ValueError(f"rows of the batch are {rows}; they must be 1 to {bounds.max_rows}")
    counts = np.diff(batch.offsets)
    if len(counts) != rows or batch.offsets[0] != 0 or batch.offsets[-1] != tokens or counts.min() < 1:
        raise ValueError(f"offsets {batch.offsets.tolist()} do not divide {tokens} tokens into {rows} rows")
    _within("token_ids", batch.token_ids, bounds.vocab_size)
    _within("positions", batch.positions, bounds.max_target_len)
    if tokens > rows and not _rise(batch):
        raise ValueError(f"positions {batch.positions.tolist()} must rise by 1 within a row")
    _check_tables("self_tables", batch.self_tables, _ends(batch), bounds.num_blocks, bounds.target_block_size)
    if bounds.has_encoder:
        _within("source_lens", batch.source_lens, bounds.max_source_len + 1)
        _check_tables("cross_tables", batch.cross_tables, batch.source_lens, bounds.num_blocks, BLOCK_SIZE)
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


def _rise(batch: DecodeBatch) -> bool:
    """Return True if the positions of each row rise by 1, as recurrences need them."""
    rises = np.diff(batch.positions) == 1
    rises[batch.offsets[1:-1] - 1] = True  # from a row to the next one
    return bool(rises.all())


def _within(name: str, values: NDArray[np.generic], end: int) -> None:
    if len(values) and (values.min() < 0 or values.max() >= end):
        raise ValueError(f"{name} are {values.min()} to {values.max()}; they must be 0 to {end - 1}")


def _check_tables(
    name: str,
    tables: NDArray[np.int32],
    lengths: NDArray[np.int32],
    num_blocks: int,
    block_size: int,
) -> None:
    """Check the entries of the blocks that each row uses; entries behind them are not used."""
    used = -(-lengths // block_size)
    if used.max() > tables.shape[1]:
        raise ValueError(f"{name} have {tables.shape[1]} columns; {lengths.max()} positions need {used.max()}")
    entries = tables[np.arange(tables.shape[1]) < used[:, None]]
    _within(name, entries, num_blocks)


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
