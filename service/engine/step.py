"""One iteration of continuous batching: drop, schedule, encode, decode, commit, publish.

Owns the running rows and the cache blocks, and is the only place where either is given up. Has no thread, no lock and
no loop of its own: the engine calls it, from one thread, and a test may as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from antiphon.service.domain.cancellation import CancelCause, Cancellations
from antiphon.service.domain.errors import AntiphonError, DeadlineExceeded, EngineFault
from antiphon.service.domain.request import ANSWERED, FinishReason, Readout, TokenEvent
from antiphon.service.engine.beam_rows import BeamRows
from antiphon.service.engine.block_pool import BlockPool
from antiphon.service.engine.commit import Ended, commit
from antiphon.service.engine.outputs import beam_events, last_of, output_event, time_limit_events
from antiphon.service.engine.preemption import Preemption
from antiphon.service.engine.request_queue import RequestQueue
from antiphon.service.engine.reservations import Reservations, empty_rows, may_run_short
from antiphon.service.engine.row_turns import RowTurns
from antiphon.service.engine.scheduler import MAX_DEFERRED_STEPS, SchedulerLimits, schedule
from antiphon.service.engine.sequence import Sequence, SequenceGroup, SequenceState, sequences_of
from antiphon.service.engine.stream import Item, OutputStream, Publisher, TokenSink
from antiphon.service.engine.token_times import TokenTimes
from antiphon.service.observability.metrics import Metrics
from antiphon.service.runtime.readout import read_out
from antiphon.service.runtime.runner import NOT_FINITE, Draw, Runner

log = logging.getLogger(__name__)

Told = tuple[tuple[TokenSink, ...], list[Item]]
"""Sinks, and a token for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """What a stepper works with. `live` holds every group without its last event, by request id.

    cancellations: those of the requests in `live` that are to be ended first.
    """

    runner: Runner
    queue: RequestQueue
    pool: BlockPool
    limits: SchedulerLimits
    metrics: Metrics
    live: dict[str, SequenceGroup]
    clock: Callable[[], float]
    cancellations: Cancellations = field(default_factory=Cancellations)


class Stepper:
    """Runs steps over the requests it admits from the queue.

    num_failed: steps in a row in which something failed and nothing was decoded.
    """

    def __init__(self, parts: StepParts) -> None:
        self._runner = parts.runner
        self._queue = parts.queue
        self._pool = parts.pool
        self._limits = parts.limits
        self._metrics = parts.metrics
        self._live = parts.live
        self._clock = parts.clock
        self._cancellations = parts.cancellations
        self._rows = empty_rows(parts.runner, parts.limits.max_num_seqs)
        can_grow = may_run_short(parts.runner, parts.limits.max_num_seqs)
        self._reservations = Reservations(self._rows, parts.pool, can_grow=can_grow)
        self._turns = RowTurns(self._rows, self._reservations, parts.queue, parts.limits)
        self._beams = BeamRows(self._rows, parts.pool, parts.runner)
        self._token_times = TokenTimes(self._rows, parts.metrics, parts.clock)
        self._publisher = Publisher()
        self._finals: list[tuple[OutputStream, TokenEvent]] = []
        self.num_failed = 0
        self._has_failed = self._has_decoded = False
        self._num_running = 0
        self._num_admitted = 0
        self._num_deferred = 0
        self._told_occupancy = (-1, -1, -1)
        self._report_occupancy()  # before the first request: an empty cache must not look like a full one

    @property
    def num_running(self) -> int:
        """Requests that hold rows."""
        return self._num_running

    @property
    def has_work(self) -> bool:
        """Whether a step now would do anything without a new command."""
        return bool(self._rows) or bool(self._queue) or bool(self._turns) or bool(self._cancellations)

    def step(self) -> None:
        """Run one step."""
        self._has_failed = self._has_decoded = False
        self._drop_cancelled()
        self._drop_expired()
        preemption = self._preemption()
        self._reservations.grow(preemption.preempt)
        self._turns.make_room(preemption.pause)
        num_before = len(self._rows)
        self._fill()
        sinks, items = self._decode(num_before) if self._rows else ((), [])
        if self._told_occupancy != self._occupancy:
            self._report_occupancy()
        self._publish(sinks, items)
        self.num_failed = self.num_failed + 1 if self._has_failed and not self._has_decoded else 0

    def end_all(self, error: Callable[[], AntiphonError]) -> None:
        """End whatever runs or waits at once, each with an error of its own: it may be raised, and grow a traceback."""
        for group in reversed(list(self._live.values())):
            self._fail_group(group, FinishReason.ERROR, error())
        self._report_occupancy()
        self._publish((), [])

    def _preemption(self) -> Preemption:
        """Return what preempts at this step. To keep it would be a cycle, which keeps an unloaded model in memory."""
        return Preemption(
            self._rows,
            self._reservations,
            self._turns,
            self._metrics,
            self._clock,
            vacate=self._vacate,
            wait=self._wait_again,
        )

    def _drop_cancelled(self) -> None:
        for request_id, cause in self._cancellations.take():
            if (group := self._live.get(request_id)) is not None:
                self._cancel(group, cause)

    def _drop_expired(self) -> None:
        now_s = self._clock()
        late = (*self._queue.expired(now_s), *self._rows.expired(now_s), *self._turns.expired(now_s))
        self._expire(dict.fromkeys(late), now_s)

    def _drop_encoded(self, groups: tuple[SequenceGroup, ...]) -> None:
        """End those whose client or time went while they were encoded, before anything is decoded for them."""
        now_s = self._clock()
        for one in groups:
            one.encoded_s = one.encoded_s or now_s  # the first time, where it was preempted
        for request_id, cause in self._cancellations.take():
            group = self._live.get(request_id)
            if group is not None and group.state is SequenceState.ENCODING:
                self._cancel(group, cause)
            else:  # this step counts on the rows that there are
                self._cancellations.put(request_id, cause)
        self._expire((group for group in groups if group.expires_s <= now_s), now_s)

    def _expire(self, groups: Iterable[SequenceGroup], now_s: float) -> None:
        for group in groups:
            deadline_s = group.request.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                self._miss_deadline(group)
            elif group.is_beam_search and group.state is SequenceState.RUNNING:
                self._end_search(group, FinishReason.TIME_LIMIT)
            else:
                self._close(group, FinishReason.TIME_LIMIT, time_limit_events(group))

    def _cancel(self, group: SequenceGroup, cause: CancelCause) -> None:
        if cause is CancelCause.DEADLINE:
            self._miss_deadline(group)
        else:
            group.cancel_cause = cause
            self._fail_group(group, FinishReason.CANCELLED)

    def _miss_deadline(self, group: SequenceGroup) -> None:
        error = DeadlineExceeded("the deadline passed before the answer")
        self._fail_group(group, FinishReason.DEADLINE, error)

    def _fill(self) -> None:
        """Give free rows to outputs of running groups, to groups that join, and to the further outputs of those."""
        self._turns.start_pending(self._runner.bos_id)
        if not self._turns.is_blocked:
            self._admit()
            self._turns.start_pending(self._runner.bos_id)

    def _admit(self) -> None:
        if not self._queue or len(self._rows) == self._limits.max_num_seqs:
            return
        batch = schedule(
            self._turns.candidates(),
            num_running=len(self._rows),
            num_free_blocks=self._reservations.num_admissible_blocks,
            limits=self._limits,
            num_deferred=MAX_DEFERRED_STEPS if self._turns.has_taken else self._num_deferred,
        )
        self._num_deferred = batch.num_deferred
        if batch.joining:
            now_s = self._clock()
            for group in batch.joining:
                self._reserve(group, now_s)
            self._start(batch.joining)

    def _start(self, groups: tuple[SequenceGroup, ...]) -> None:
        """Encode what is to be encoded, and give rows to what is to be decoded."""
        if self._runner.has_encoder:
            self._encode(groups)
            return
        self._metrics.prompted(sum(group.request.num_source_tokens for group in groups))
        self._append(groups)

    def _encode(self, groups: tuple[SequenceGroup, ...]) -> None:
        requests = [group.request for group in groups]
        sources = [request.source_ids for request in requests]
        tables = [group.cross_block_table for group in groups]
        types = [request.type_ids for request in requests]
        is_read = any(not request.has_target for request in requests)
        try:
            report = self._runner.encode(sources, tables, type_ids=types, keep_memory=is_read)
            found = read_out(requests, report.memory, self._runner) if report.memory is not None else {}
        except Exception as fault:
            if len(groups) == 1:
                self._fail(groups, "encode", fault)
                return
            log.warning("encoding %d sources together failed; trying each alone", len(groups), exc_info=fault)
            for group in groups:
                self._encode((group,))
            return
        self._metrics.encoded(report, sum(map(len, sources)))
        self._drop_encoded(groups)
        self._append(groups)
        for group in groups:
            if group.request_id in found:
                self._end_read(group, found[group.request_id])

    def _append(self, groups: Iterable[SequenceGroup]) -> None:
        """Give rows to those that have not ended meanwhile."""
        joining = [group for group in groups if group.state is not SequenceState.FINISHED]
        for group in joining:
            group.state = SequenceState.RUNNING
        self._rows.append((one for group in joining for one in group.starting), self._runner.bos_id)
        for group in joining:
            self._turns.wait(group)
            if group.is_beam_search:
                self._beams.add(group)

    def _end_read(self, group: SequenceGroup, readout: Readout) -> None:
        """End a group that only wanted its source encoded and read."""
        reason = FinishReason.STOP
        event = TokenEvent(request_id=group.request_id, finish_reason=reason, is_last=True, readout=readout)
        self._close(group, reason, [event])

    def _reserve(self, group: SequenceGroup, now_s: float) -> None:
        """Take a group out of the queue, and its blocks out of the pool."""
        self._queue.take(group.request_id, now_s)
        group.state = SequenceState.ENCODING
        self._num_running += 1
        if group.admitted_s is None:
            self._num_admitted += 1
            group.ticket, group.admitted_s = self._num_admitted, now_s
            group.sequences = sequences_of(group, self._runner.bos_id, self._runner.eos_id)
            self._metrics.admitted(now_s - group.request.arrival_s, group.request.trace_id)
        group.take_first_rows()
        self._reservations.take(group)
        self._turns.joined(group)

    def _wait_again(self, group: SequenceGroup) -> None:
        """Let a group that was preempted wait before all new ones."""
        group.state = SequenceState.WAITING
        self._num_running -= 1
        self._queue.put_back(group)

    def _decode(self, num_before: int) -> Told:
        """Decode every row, the ones from `num_before` on for the first time; returns what is to be published."""
        try:
            draw = self._runner.decode(self._rows.batch())
            over = self._beams.advance(draw) if len(self._beams) else []
        except Exception as fault:
            self._fail([one.group for one in self._rows.sequences], "decode", fault)
            return (), []
        self._has_decoded = bool((draw.token_ids[: len(self._rows)] != NOT_FINITE).any())
        self._rows.advance(draw.token_ids[: len(self._rows)])
        self._token_times.note(num_before)
        if self._rows.num_beams:
            return self._commit_beams(draw, over)
        return self._commit(draw)

    def _commit(self, draw: Draw) -> Told:
        """End the outputs that are done; returns what is told of the others."""
        committed = commit(self._rows, draw, self._runner.eos_id)
        # From the last row down: the row that moves into a hole is then one that stays.
        for ended in committed.ended:
            self._end_output(ended)
        return committed.sinks, committed.items

    def _commit_beams(self, draw: Draw, over: list[SequenceGroup]) -> Told:
        """As _commit, where some rows are beams."""
        rows = self._rows
        is_broken = rows.is_beam[: len(rows)] & (draw.token_ids[: len(rows)] == NOT_FINITE)
        broken = list(dict.fromkeys(rows.sequences[row].group for row in np.flatnonzero(is_broken).tolist()))
        sinks, items = self._beams.told()
        others = self._commit(draw)
        for group in broken:
            self._break(group)
        for group in over:
            if group.state is not SequenceState.FINISHED:
                self._end_search(group)
        return (*others[0], *sinks), [*others[1], *items]

    def _end_output(self, ended: Ended) -> None:
        """End one output of a request, and the request with its last."""
        sequence, group = ended.sequence, ended.sequence.group
        if group.state is SequenceState.FINISHED:
            return
        if ended.reason is FinishReason.ERROR:
            self._break(group)
            return
        self._vacate(sequence)
        sequence.is_finished = True
        group.num_finished += 1
        event = output_event(sequence, ended.reason, ended.logprobs)
        if group.num_finished == group.num_rows:
            self._close(group, ended.reason, [event])
        else:
            self._reservations.give_back_output(sequence)
            self._finals.append((group.stream, event))

    def _end_search(self, group: SequenceGroup, reason: FinishReason | None = None) -> None:
        """End a beam search with its best hypotheses; a reason ends those that are still growing."""
        found, num_told = self._beams.hypotheses(group, reason)
        group.num_generated = sum(len(one.token_ids) for one in found)
        events = beam_events(group, found, num_told, reason)
        self._close(group, events[0].finish_reason or FinishReason.STOP, events)

    def _break(self, group: SequenceGroup) -> None:
        self._has_failed = True
        log.error("request %s: the model's logits are not finite", group.request_id)
        self._fail_group(group, FinishReason.ERROR, EngineFault("the model produced no valid token"))

    def _fail(self, groups: Iterable[SequenceGroup], doing: str, fault: Exception) -> None:
        """End the groups that a fault of the runner touched; the cause goes to the log, not to the client."""
        self._has_failed = True
        affected = list(dict.fromkeys(groups))
        log.error("the model failed to %s; %d requests end", doing, len(affected), exc_info=fault)
        for group in reversed(affected):
            self._fail_group(group, FinishReason.ERROR, EngineFault(f"the model failed to {doing}"))

    def _fail_group(self, group: SequenceGroup, reason: FinishReason, error: AntiphonError | None = None) -> None:
        """End a request without its outputs."""
        event = TokenEvent(request_id=group.request_id, finish_reason=reason, is_last=True, error=error)
        self._close(group, reason, [event])

    def _close(self, group: SequenceGroup, reason: FinishReason, events: list[TokenEvent]) -> None:
        """Give up a group's place, rows and blocks, and queue its last events; later calls do nothing."""
        if group.state is SequenceState.FINISHED:
            return
        stage = group.state
        group.state = SequenceState.FINISHED
        group.stream.end_reason = reason
        self._release(group)
        if not group.is_beam_search:
            group.num_generated = sum(sequence.num_generated for sequence in group.sequences)
        if stage is not SequenceState.WAITING:
            self._num_running -= 1
            self._reservations.give_back(group)
        del self._live[group.request_id]
        timing = group.timing(self._clock())
        self._finals += [(group.stream, event) for event in last_of(events, group, timing)]
        self._metrics.finished(reason, stage.value, timing, cause=group.cancel_cause, trace_id=group.request.trace_id)
        if reason in ANSWERED and timing.queued_s is not None and group.num_generated:
            self._queue.answered(timing.total_s - timing.queued_s, group.num_generated // group.num_rows)

    def _release(self, group: SequenceGroup) -> None:
        self._queue.remove(group.request_id)
        self._turns.forget(group)
        self._beams.remove(group)
        # From the last row down: the row that moves into a hole is then never one of these.
        for sequence in sorted(group.sequences, key=lambda one: -1 if one.row is None else -one.row):
            if sequence.row is not None:
                self._vacate(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        row = sequence.row
        assert row is not None
        sequence.num_generated = self._rows.num_generated(row)
        self._rows.remove(row)

    @property
    def _occupancy(self) -> tuple[int, int, int]:
        """Requests that run, blocks that are free, and blocks of sources: what gauges are made of."""
        return self._num_running, self._pool.num_free, self._reservations.num_cross_blocks

    def _report_occupancy(self) -> None:
        self._metrics.occupied(self._num_running, self._reservations.use(self._runner.cache_bytes_per_token))
        self._told_occupancy = self._occupancy

    def _publish(self, sinks: tuple[TokenSink, ...], items: list[Item]) -> None:
        finals, self._finals = self._finals, []
        if items or finals:
            for sink in self._publisher.publish(sinks, items, finals):
                self._cancellations.put(sink.request_id, CancelCause.LOST_LOOP)
