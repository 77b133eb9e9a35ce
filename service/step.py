"""One iteration of continuous batching: drop, schedule, encode, decode, commit, publish.

Owns the running rows and the cache blocks, and is the only place where either is given up. Has no thread, no lock and
no loop of its own: the engine calls it, from one thread, and a test may as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.service.errors import AntiphonError, DeadlineExceeded, EngineFault
from antiphon.service.kv_cache import BlockPool, blocks_for
from antiphon.service.metrics import CacheUse, Metrics
from antiphon.service.request import FinishReason, TokenEvent
from antiphon.service.request_queue import RequestQueue
from antiphon.service.rows import RunningRows
from antiphon.service.runner import Draw, Runner
from antiphon.service.scheduler import SchedulerLimits, schedule
from antiphon.service.sequence import Sequence, SequenceState
from antiphon.service.stream import OutputStream, Publisher

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """What a stepper works with. `live` holds every sequence without a terminal event, by request id."""

    runner: Runner
    queue: RequestQueue
    pool: BlockPool
    limits: SchedulerLimits
    metrics: Metrics
    live: dict[str, Sequence]
    clock: Callable[[], float]


class Stepper:
    """Runs steps over the sequences it admits from the queue."""

    def __init__(self, parts: StepParts) -> None:
        self._runner = parts.runner
        self._queue = parts.queue
        self._pool = parts.pool
        self._limits = parts.limits
        self._metrics = parts.metrics
        self._live = parts.live
        self._clock = parts.clock
        self._rows = _empty_rows(parts)
        self._publisher = Publisher()
        self._finals: list[tuple[OutputStream, TokenEvent]] = []
        self._lost: list[str] = []
        self._last_decode_s = 0.0
        self._num_self_blocks = 0
        self._num_deferred = 0
        self._report_occupancy()  # before the first request: an empty cache must not look like a full one

    @property
    def num_running(self) -> int:
        """Sequences that hold a row."""
        return len(self._rows)

    @property
    def has_work(self) -> bool:
        """Whether a step now would do anything without a new command."""
        return bool(self._rows) or bool(self._queue) or bool(self._lost)

    def step(self, cancelled: Iterable[str] = ()) -> None:
        """Run one step; `cancelled` are request ids to end first, unknown ones ignored."""
        self._drop_cancelled(cancelled)
        self._drop_expired()
        num_before = len(self._rows)
        self._admit()
        streams, token_ids = self._decode(num_before) if self._rows else ((), [])
        if self._is_occupancy_stale:
            self._report_occupancy()
        self._publish(streams, token_ids)

    def end_all(self, error: Callable[[], AntiphonError]) -> None:
        """End whatever runs or waits at once, each with an error of its own: it may be raised, and grow a traceback."""
        for sequence in reversed(list(self._live.values())):
            self._end(sequence, FinishReason.ERROR, error())
        self._report_occupancy()
        self._publish((), [])

    def _drop_cancelled(self, cancelled: Iterable[str]) -> None:
        lost, self._lost = self._lost, []
        for request_id in (*cancelled, *lost):
            sequence = self._live.get(request_id)
            if sequence is not None:
                self._end(sequence, FinishReason.CANCELLED)

    def _drop_expired(self) -> None:
        now_s = self._clock()
        late = self._queue.expired(now_s) + self._rows.expired(now_s)
        for sequence in late:
            self._end(sequence, FinishReason.DEADLINE, DeadlineExceeded("the deadline passed before the answer"))

    def _admit(self) -> None:
        if not self._queue or len(self._rows) == self._limits.max_num_seqs:
            return
        batch = schedule(
            self._queue.peek(1 + self._limits.max_num_seqs - len(self._rows)),
            num_running=len(self._rows),
            num_free_blocks=self._pool.num_free,
            limits=self._limits,
            num_deferred=self._num_deferred,
        )
        self._num_deferred = batch.num_deferred
        if batch.joining:
            now_s = self._clock()
            for sequence in batch.joining:
                self._reserve(sequence, now_s)
            self._encode(batch.joining)

    def _encode(self, sequences: tuple[Sequence, ...]) -> None:
        sources = [sequence.request.source_ids for sequence in sequences]
        tables = [sequence.cross_block_table for sequence in sequences]
        try:
            report = self._runner.encode(sources, len(self._rows), tables)
        except Exception as fault:
            if len(sequences) == 1:
                self._fail(sequences, "encode", fault)
                return
            log.warning("encoding %d sources together failed; trying each alone", len(sequences), exc_info=fault)
            for sequence in sequences:
                self._encode((sequence,))
            return
        self._metrics.encoded(report, sum(map(len, sources)))
        self._rows.append(sequences, self._runner.bos_id)

    def _reserve(self, sequence: Sequence, now_s: float) -> None:
        self._queue.remove(sequence.request_id)
        sequence.self_block_table = self._pool.allocate(sequence.num_self_blocks)
        sequence.cross_block_table = self._pool.allocate(sequence.num_cross_blocks)
        self._num_self_blocks += sequence.num_self_blocks
        sequence.state = SequenceState.RUNNING
        sequence.admitted_s = now_s
        self._is_occupancy_stale = True
        self._metrics.admitted(now_s - sequence.request.arrival_s)

    def _decode(self, num_before: int) -> tuple[tuple[OutputStream, ...], list[int]]:
        """Decode every row, the ones from `num_before` on for the first time; returns what is to be published."""
        try:
            draw = self._runner.decode(self._rows.batch())
        except Exception as fault:
            self._fail(self._rows.sequences, "decode", fault)
            return (), []
        self._rows.advance(draw.token_ids)
        self._time_tokens(num_before)
        return self._commit(draw)

    def _time_tokens(self, num_before: int) -> None:
        now_s = self._clock()
        for sequence in self._rows.sequences[num_before:]:
            sequence.first_token_s = now_s
            self._metrics.first_token(now_s - sequence.request.arrival_s)
        self._metrics.decoded(len(self._rows), num_before, now_s - self._last_decode_s)
        self._last_decode_s = now_s

    def _commit(self, draw: Draw) -> tuple[tuple[OutputStream, ...], list[int]]:
        """End the rows that are done; returns the streams that get a token of this step, and the tokens."""
        rows, num_rows = self._rows, len(self._rows)
        streams, token_ids = rows.streams, draw.token_ids.tolist()
        is_silent = (draw.token_ids == self._runner.eos_id) | (draw.token_ids < 0)
        is_done = is_silent | (rows.positions[:num_rows] >= rows.end_positions[:num_rows])
        if is_done.any():
            if is_silent.any():
                heard = np.flatnonzero(~is_silent).tolist()
                streams = tuple(streams[row] for row in heard)
                token_ids = [token_ids[row] for row in heard]
            self._end_rows(np.flatnonzero(is_done), draw.token_ids)
        return streams, token_ids

    def _end_rows(self, done: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        # From the last row down: the row that moves into a hole is then one that stays.
        for row in reversed(done.tolist()):
            sequence = self._rows.sequences[row]
            if token_ids[row] < 0:
                log.error("request %s: the model's logits are not finite", sequence.request_id)
                self._end(sequence, FinishReason.ERROR, EngineFault("the model produced no valid token"))
            elif token_ids[row] == self._runner.eos_id:
                self._end(sequence, FinishReason.STOP)
            else:
                self._end(sequence, FinishReason.LENGTH)

    def _fail(self, sequences: Iterable[Sequence], doing: str, fault: Exception) -> None:
        """End the sequences that a fault of the runner touched; the cause goes to the log, not to the client."""
        affected = list(sequences)
        log.error("the model failed to %s; %d requests end", doing, len(affected), exc_info=fault)
        for sequence in reversed(affected):
            self._end(sequence, FinishReason.ERROR, EngineFault(f"the model failed to {doing}"))

    def _end(self, sequence: Sequence, reason: FinishReason, error: AntiphonError | None = None) -> None:
        """Give up a sequence's place, row and blocks, and queue its one terminal event; later calls do nothing."""
        if sequence.state is SequenceState.FINISHED:
            return
        stage = sequence.state.value
        sequence.state = SequenceState.FINISHED
        self._release(sequence)
        del self._live[sequence.request_id]
        timing = sequence.timing(self._clock())
        event = TokenEvent(
            request_id=sequence.request_id,
            finish_reason=reason,
            num_generated=sequence.num_generated,
            timing=timing,
            error=error,
        )
        self._finals.append((sequence.stream, event))
        self._metrics.finished(reason, stage, timing)

    def _release(self, sequence: Sequence) -> None:
        self._queue.remove(sequence.request_id)
        if sequence.row is not None:
            sequence.num_generated = self._rows.num_generated(sequence.row)
            self._vacate(sequence.row)
        if sequence.self_block_table:
            self._num_self_blocks -= len(sequence.self_block_table)
            self._pool.free(sequence.self_block_table + sequence.cross_block_table)
            sequence.self_block_table = sequence.cross_block_table = ()
            self._is_occupancy_stale = True

    def _vacate(self, row: int) -> None:
        moved = self._rows.remove(row)
        if moved is None:
            return
        try:
            self._runner.move_row(len(self._rows), row, int(self._rows.positions[row]), moved.source_len)
        except Exception as fault:
            self._fail((moved,), "move a row", fault)

    def _report_occupancy(self) -> None:
        pool = self._pool
        use = CacheUse(
            num_self=self._num_self_blocks,
            num_cross=pool.num_used - self._num_self_blocks,
            num_free=pool.num_free,
            block_bytes=pool.block_size * self._runner.cache_bytes_per_token,
        )
        self._metrics.occupied(len(self._rows), use)
        self._is_occupancy_stale = False

    def _publish(self, streams: tuple[OutputStream, ...], token_ids: list[int]) -> None:
        finals, self._finals = self._finals, []
        if token_ids or finals:
            lost = self._publisher.publish(streams, token_ids, finals)
            self._lost = [stream.request_id for stream in lost]


def _empty_rows(parts: StepParts) -> RunningRows:
    runner, block_size = parts.runner, parts.pool.block_size
    return RunningRows(
        parts.limits.max_num_seqs,
        self_width=blocks_for(runner.max_target_len, block_size),
        cross_width=blocks_for(runner.max_source_len, block_size),
    )
