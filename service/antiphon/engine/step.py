"""One iteration of continuous batching: drop, join, decode, commit, publish.

A stepper has no thread and no loop: the engine calls it from one thread, and tests call it directly.

    WAITING --admit--> ENCODING --begin--> RUNNING --last output--> FINISHED
       ^                                      |
       +--------------- preempt --------------+        from every state: abort, time limit

Everything that a request holds is freed in `Stepper._finish`, in which it also gets its terminal event.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceABC
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from antiphon.domain.errors import AntiphonError, DeadlineExceeded, EngineFault
from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import ANSWERED, CancelCause, Cancellations, EncoderOutputs, FinishReason, TokenEvent
from antiphon.engine.batch import RunningRows
from antiphon.engine.beam_search import BeamRows
from antiphon.engine.kv_cache import BlockPool, KVCache, may_run_short
from antiphon.engine.outputs import EndedOutput, beam_events, commit, last_of, output_event, time_limit_events
from antiphon.engine.request_queue import RequestQueue
from antiphon.engine.row_budget import RowBudget
from antiphon.engine.scheduler import MAX_DEFERRED_STEPS, early_groups, may_encode_early, schedule
from antiphon.engine.sequence import Sequence, SequenceGroup, SequenceState, sequences_of
from antiphon.engine.stream import Item, Publisher, RequestStream, TokenSink
from antiphon.observability.engine_metrics import Metrics
from antiphon.runtime.encoder_outputs import read_out
from antiphon.runtime.runner import NOT_FINITE, EncodeReport, Runner, Samples

log = logging.getLogger(__name__)


class EngineState:
    """Objects that the steppers of all lanes share.

    live: every group that has not received its last event, by request id.
    cancellations: requests that the next step of any lane ends first.
    lock: held during a step, except while the runner computes. It protects the state of all lanes.
    tickets: numbers of admitted groups, rising.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        queue: RequestQueue,
        pool: BlockPool,
        limits: EngineLimits,
        metrics: Metrics,
        live: dict[str, SequenceGroup],
        clock: Callable[[], float],
        cancellations: Cancellations,
    ) -> None:
        """runner: of any lane."""
        self.queue = queue
        self.cache = KVCache(pool, runner.facts.target_block_size)
        self.budget = RowBudget(queue, self.cache, limits, can_grow=may_run_short(runner, limits.max_num_seqs))
        self.limits = limits
        self.metrics = metrics
        self.live = live
        self.clock = clock
        self.cancellations = cancellations
        self.lock = threading.Lock()
        self.tickets = itertools.count(1)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Let other lanes step while the runner of one lane computes."""
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()


class StepTokens(NamedTuple):
    """Tokens of one step to stream: items[i] for sinks[i]. has_decoded: at least one row received a valid token."""

    sinks: tuple[TokenSink, ...] = ()
    items: SequenceABC[Item] = ()
    has_decoded: bool = False


class Stepper:
    """Runs the steps of one lane over the requests that it admits from the queue.

    num_failed: consecutive steps in which something failed and nothing was decoded.
    """

    def __init__(self, state: EngineState, runner: Runner) -> None:
        self.num_failed = 0
        self._state = state
        self._queue = state.queue
        self._cache = state.cache
        self._budget = state.budget
        self._metrics = state.metrics
        self._clock = state.clock
        self._runner = runner
        self._rows = RunningRows.of_runner(runner, state.limits.max_num_seqs)
        self._lane = self._budget.add_lane(self._rows)
        self._beams = BeamRows(self._rows, self._cache, runner)
        self._publisher = Publisher()
        self._events: list[tuple[RequestStream, TokenEvent]] = []  # terminal events of this step
        self._has_failed = False  # the runner failed in this step, or returned no valid token
        self._num_deferred = 0  # of the scheduler
        self._last_decode_s = 0.0
        self._undecoded: list[Sequence] = []  # of the last step's rows, those that the runner left out
        self._num_empty, self._empty_since_s = 0, 0.0  # rows that this lane may fill and has not filled
        self._occupancy: tuple[int, int, int] | None = None  # reported last
        self._report_occupancy()  # before the first request: a gauge of 0 free blocks would look like a full cache

    @property
    def num_running(self) -> int:
        """Requests of this lane that hold rows."""
        return len(self._lane.groups)

    @property
    def has_work(self) -> bool:
        """True when a step would have work now."""
        return self._lane.has_work or bool(self._queue) or bool(self._state.cancellations)

    @property
    def may_rest(self) -> bool:
        """True when this lane runs nothing, so that waiting requests that it left can start after another's step."""
        return not self._lane.has_work and self._budget.is_other_running(self._lane)

    @property
    def admitted(self) -> tuple[SequenceGroup, ...]:
        """Requests of this lane that hold rows or blocks. The engine's lock must be held."""
        return tuple(self._lane.groups.values())

    def step(self) -> None:
        """Run one step. Other lanes can step while the runner computes."""
        with self._state.lock:
            self._step()

    def _step(self) -> None:
        self._has_failed = False
        if self._lane.cancellations or self._state.cancellations:
            self._drop_cancelled()
        self._drop_expired()
        self._budget.grow(self._lane, self._preempt)
        self._budget.make_room(self._lane, self._pause)
        num_before = len(self._rows)
        self._join()
        self._note_empty_rows()
        tokens = self._decode(num_before)
        self._note_empty_rows()
        self._report_occupancy()
        self._publish(tokens)
        self.num_failed = self.num_failed + 1 if self._has_failed and not tokens.has_decoded else 0

    def end_all(self, error: Callable[[], AntiphonError]) -> None:
        """End every waiting request, and every one of this lane, at once.

        error: makes a separate error for each request, because a raised error keeps its traceback.
        """
        with self._state.lock:
            for group in reversed(list(self._state.live.values())):
                if group.lane in (None, self._lane.index):
                    self._abort(group, FinishReason.ERROR, error())
            self._report_occupancy()
            self._publish(StepTokens())

    def _publish(self, tokens: StepTokens) -> None:
        events, self._events = self._events, []
        if tokens.items or events:
            for sink in self._publisher.publish(tokens.sinks, tokens.items, events):
                self._state.cancellations.put(sink.request_id, CancelCause.LOST_LOOP)

    # Drop: requests that were cancelled, or whose deadline or time limit has come.

    def _drop_cancelled(self) -> None:
        """End every request of this lane, and every waiting one, that was cancelled since the last call."""
        for group, cause in self._take_cancelled():
            self._cancel(group, cause)

    def _drop_expired(self) -> None:
        """End every request whose deadline or time limit has come, waiting or running."""
        now_s = self._clock()
        pending = [group for group in self._lane.pending.values() if group.expires_s <= now_s]
        late = (*self._queue.expired(now_s), *self._rows.expired(now_s), *pending)
        self._expire(dict.fromkeys(late), now_s)

    def _drop_encoded(self, groups: tuple[SequenceGroup, ...]) -> None:
        """End groups that were cancelled or expired while they were encoded, before anything is decoded for them."""
        now_s = self._clock()
        for group in groups:
            group.encoded_s = group.encoded_s or now_s  # a preempted group keeps the time of its first encoding
        for group, cause in self._take_cancelled():
            if group.state is SequenceState.ENCODING:
                self._cancel(group, cause)
            else:  # the rows in use must not change during this step
                self._lane.cancellations.put(group.request_id, cause)
        self._expire((group for group in groups if group.expires_s <= now_s), now_s)

    def _take_cancelled(self) -> list[tuple[SequenceGroup, CancelCause]]:
        """Return the cancelled groups of this lane and of the queue; pass those of other lanes on to them."""
        cancelled = []
        for request_id, cause in (*self._lane.cancellations.take(), *self._state.cancellations.take()):
            group = self._state.live.get(request_id)
            if group is None:
                continue
            if group.lane is None or group.lane == self._lane.index:
                cancelled.append((group, cause))
            else:
                self._budget.lanes[group.lane].cancellations.put(request_id, cause)
        return cancelled

    def _expire(self, groups: Iterable[SequenceGroup], now_s: float) -> None:
        for group in groups:
            deadline_s = group.request.deadline_s
            if deadline_s is not None and deadline_s <= now_s:
                self._miss_deadline(group)
            elif group.is_beam_search and group.num_running_rows:
                self._finish_search(group, FinishReason.TIME_LIMIT)
            else:
                self._finish(group, FinishReason.TIME_LIMIT, time_limit_events(group, self._rows))

    def _cancel(self, group: SequenceGroup, cause: CancelCause) -> None:
        if cause is CancelCause.DEADLINE:
            self._miss_deadline(group)
        else:
            group.cancel_cause = cause
            self._abort(group, FinishReason.CANCELLED)

    def _miss_deadline(self, group: SequenceGroup) -> None:
        self._abort(group, FinishReason.DEADLINE, DeadlineExceeded("the deadline passed before the answer"))

    # Preempt: outputs that continue later with the same tokens.

    def _pause(self, sequence: Sequence) -> None:
        """Let one output wait for a row again. If its group has no other row, the group waits in the queue."""
        group = sequence.group
        if group.num_running_rows == 1:  # no other row needs the encoded source now
            self._preempt(group)
            return
        self._set_aside(sequence)
        self._cache.free_output(sequence)
        group.pending = sorted((*group.pending, sequence), key=lambda pending: pending.index)
        self._budget.wait(self._lane, group)

    def _preempt(self, group: SequenceGroup) -> None:
        """Put a running group with one row back into the queue, before all new ones, and free all its blocks."""
        (sequence,) = (running for running in group.sequences if running.row is not None)
        self._set_aside(sequence)
        self._budget.release(self._lane, group)
        self._cache.free_preempted(group)
        group.state, group.lane = SequenceState.WAITING, None
        self._queue.put_back(group)

    def _set_aside(self, sequence: Sequence) -> None:
        """Free a row and keep its tokens."""
        sequence.produced = self._rows.produced(sequence.running_row())
        self._vacate(sequence)
        sequence.group.preempted_s = self._clock()
        self._metrics.preempted()

    # Join: requests leave the queue, their sources are encoded, and their rows start.

    def _join(self) -> None:
        """Give free rows to outputs of running groups, to joining groups, and to the further outputs of these."""
        self._start_pending()
        if not self._lane.is_blocked:
            self._admit()
            self._start_pending()

    def _start_pending(self) -> None:
        for group in self._budget.start_pending(self._lane, self._runner.facts.bos_id):
            self._beams.add(group)

    def _admit(self) -> None:
        state, budget, lane = self._state, self._budget, self._lane
        if not self._queue or not (num_free := budget.num_free(lane)):
            return
        is_early = may_encode_early(
            self._runner, state.limits, len(self._queue), is_contended=budget.is_contended(lane)
        )
        batch = schedule(
            budget.candidates(lane),
            num_running=state.limits.max_num_seqs - num_free,
            num_free_blocks=budget.num_admissible_blocks,
            limits=state.limits,
            num_lanes=len(budget.lanes),
            num_deferred=MAX_DEFERRED_STEPS if lane.has_taken or is_early else self._num_deferred,
        )
        self._num_deferred = batch.num_deferred
        if batch.joining:
            now_s = self._clock()
            for group in batch.joining:
                self._reserve(group, now_s)
            early = self._reserve_early(batch.joining, now_s) if is_early else ()
            self._start((*batch.joining, *early))

    def _reserve_early(self, joining: tuple[SequenceGroup, ...], now_s: float) -> tuple[SequenceGroup, ...]:
        """Take more groups out of the queue, to be encoded with those that join, and to wait for rows after that."""
        groups = early_groups(
            self._queue,
            joining,
            limits=self._state.limits,
            num_lanes=len(self._budget.lanes),
            num_free_blocks=self._budget.num_admissible_blocks,
            num_blocks=self._cache.pool.num_blocks,
        )
        for group in groups:
            self._reserve(group, now_s, is_early=True)
        return groups

    def _reserve(self, group: SequenceGroup, now_s: float, *, is_early: bool = False) -> None:
        """Take a group out of the queue, and blocks for it out of the pool; no rows if it is early."""
        self._queue.take(group.request_id, now_s)
        group.state, group.lane = SequenceState.ENCODING, self._lane.index
        if group.admitted_s is None:
            group.ticket, group.admitted_s = next(self._state.tickets), now_s
            group.sequences = sequences_of(group, self._runner.facts.bos_id, self._runner.facts.eos_id)
            self._metrics.admitted(now_s - group.request.arrival_s, group.request.trace_id)
        group.take_first_rows(0 if is_early else group.num_first_rows)
        self._cache.allocate(group)
        self._budget.admit(self._lane, group)

    def _start(self, groups: tuple[SequenceGroup, ...]) -> None:
        """Encode the groups' sources if the model has an encoder, and give the groups their rows."""
        if self._runner.facts.has_encoder:
            self._encode(groups)
            return
        self._metrics.prompted(sum(group.request.num_source_tokens for group in groups))
        self._append(groups)

    def _encode(self, groups: tuple[SequenceGroup, ...]) -> None:
        try:
            report, outputs = self._run_encoder(groups)
        except Exception as fault:
            if len(groups) == 1:
                self._fail(groups, "encode", fault)
                return
            log.warning("encoding %d sources together failed; trying each alone", len(groups), exc_info=fault)
            for group in groups:
                self._encode((group,))
            return
        self._metrics.encoded(report, sum(group.source_len for group in groups))
        self._drop_encoded(groups)
        self._append(groups)
        for group in groups:
            if group.request_id in outputs:
                self._finish_encoded(group, outputs[group.request_id])

    def _run_encoder(self, groups: tuple[SequenceGroup, ...]) -> tuple[EncodeReport, dict[str, EncoderOutputs]]:
        """Encode the groups' sources together. Return the cost, and the requested encoder outputs by request id."""
        runner = self._runner
        requests = [group.request for group in groups]
        sources = [request.source_ids for request in requests]
        tables = [group.cross_block_table for group in groups]
        types = [request.type_ids for request in requests]
        is_read = any(not request.has_target for request in requests)
        with self._state.computing():
            report = runner.encode(sources, tables, type_ids=types, keep_memory=is_read)
            outputs = read_out(requests, report.memory, runner) if report.memory is not None else {}
        return report, outputs

    def _append(self, groups: Iterable[SequenceGroup]) -> None:
        """Give rows to the groups that have not ended meanwhile."""
        joining = [group for group in groups if group.state is not SequenceState.FINISHED]
        for group in joining:
            group.state = SequenceState.RUNNING
        self._rows.append((sequence for group in joining for sequence in group.starting), self._runner.facts.bos_id)
        for group in joining:
            self._budget.begin(self._lane, group)
            if group.is_beam_search and group.starting:
                self._beams.add(group)

    # Decode: one token for every row.

    def _decode(self, num_before: int) -> StepTokens:
        """Decode every row; return the tokens to stream.

        Rows from `num_before` on decode for the first time, and the runner may leave them to the next step.
        """
        rows = self._rows
        if not rows:
            return StepTokens()
        try:
            batch = rows.batch(num_before)
            with self._state.computing():
                samples = self._runner.decode(batch)
            finished = self._beams.advance(samples) if len(self._beams) else []
        except Exception as fault:
            self._fail([sequence.group for sequence in rows.sequences], "decode", fault)
            return StepTokens()
        token_ids = samples.token_ids[: len(rows)]
        has_decoded = token_ids.tolist().count(NOT_FINITE) < len(token_ids)
        rows.advance(token_ids)
        self._note_token_times(num_before, len(token_ids))
        if rows.num_beams:
            return self._commit_beams(samples, finished)._replace(has_decoded=has_decoded)
        return StepTokens(*self._commit(samples), has_decoded)

    def _commit(self, samples: Samples) -> tuple[tuple[TokenSink, ...], SequenceABC[Item]]:
        """End the outputs that are finished; returns the other rows' sinks and tokens."""
        committed = commit(self._rows, samples, self._runner.facts.eos_id)
        # From the last row down, so that the row that moves into a freed one is a row that continues.
        for ended in committed.ended:
            self._finish_output(ended)
        return committed.sinks, committed.items

    def _commit_beams(self, samples: Samples, finished: list[SequenceGroup]) -> StepTokens:
        """End outputs and searches that are finished, where some rows are beams; returns the tokens to stream."""
        rows = self._rows
        is_invalid = samples.token_ids[: len(rows)] == NOT_FINITE
        failed = np.flatnonzero(is_invalid & rows.is_beam[: len(rows)]).tolist() if is_invalid.any() else []
        invalid = dict.fromkeys(rows.sequences[row].group for row in failed)
        beam_sinks, beam_items = self._beams.common_tokens()
        sinks, items = self._commit(samples) if rows.num_beams < len(rows) else ((), [])
        for group in invalid:
            self._abort_invalid(group)
        for group in finished:
            if group.state is not SequenceState.FINISHED:
                self._finish_search(group)
        return StepTokens((*sinks, *beam_sinks), [*items, *beam_items])

    # Finish: outputs and requests end.

    def _finish(self, group: SequenceGroup, reason: FinishReason, events: list[TokenEvent]) -> None:
        """End a request with its last events, and free its queue place, rows and blocks. Later calls do nothing."""
        if group.state is SequenceState.FINISHED:
            return
        stage = group.state
        group.state = SequenceState.FINISHED
        group.stream.end_reason = reason
        self._queue.remove(group.request_id)
        self._budget.release(self._lane, group)
        self._beams.remove(group)
        # From the last row down, so that the row that moves into a freed one is never one of these.
        running = [sequence for sequence in group.sequences if sequence.row is not None]
        for sequence in sorted(running, key=Sequence.running_row, reverse=True):
            self._vacate(sequence)
        if not group.is_beam_search:
            group.num_generated = sum(sequence.num_generated for sequence in group.sequences)
        if stage is not SequenceState.WAITING:
            self._cache.free(group)
        del self._state.live[group.request_id]
        self._report_end(group, reason, stage, events)
        # A group and its sequences refer to each other: together they would wait for the garbage collector.
        group.sequences = group.starting = ()
        group.pending = []

    def _finish_encoded(self, group: SequenceGroup, outputs: EncoderOutputs) -> None:
        """End a group that needs only outputs of its encoded source."""
        reason = FinishReason.STOP
        event = TokenEvent(request_id=group.request_id, finish_reason=reason, is_last=True, encoder_outputs=outputs)
        self._finish(group, reason, [event])

    def _finish_output(self, ended: EndedOutput) -> None:
        """End one output of a request, and the request with its last output."""
        sequence, group = ended.sequence, ended.sequence.group
        if group.state is SequenceState.FINISHED:
            return
        if ended.reason is FinishReason.ERROR:
            self._abort_invalid(group)
            return
        self._vacate(sequence)
        sequence.is_finished = True
        group.num_finished += 1
        event = output_event(sequence, ended.reason, logprobs=ended.logprobs, token_ids=ended.token_ids)
        if group.num_finished == group.num_rows:
            self._finish(group, ended.reason, [event])
        else:
            self._cache.free_output(sequence)
            self._events.append((group.stream, event))

    def _finish_search(self, group: SequenceGroup, reason: FinishReason | None = None) -> None:
        """End a beam search with its best hypotheses. With a reason, its live beams become hypotheses too."""
        hypotheses, num_streamed = self._beams.hypotheses(group, reason)
        group.num_generated = sum(len(hypothesis.token_ids) for hypothesis in hypotheses)
        group.beam_steps = self._beams.steps(group)
        events = beam_events(group, hypotheses, num_streamed, reason)
        self._finish(group, events[0].finish_reason or FinishReason.STOP, events)

    def _abort(self, group: SequenceGroup, reason: FinishReason, error: AntiphonError | None = None) -> None:
        """End a request without its outputs."""
        event = TokenEvent(request_id=group.request_id, finish_reason=reason, is_last=True, error=error)
        self._finish(group, reason, [event])

    def _abort_invalid(self, group: SequenceGroup) -> None:
        """End a request for which the model returned no valid token."""
        self._has_failed = True
        log.error("request %s: the model's logits are not finite", group.request_id)
        self._abort(group, FinishReason.ERROR, EngineFault("the model produced no valid token"))

    def _fail(self, groups: Iterable[SequenceGroup], doing: str, fault: Exception) -> None:
        """End the groups that a fault of the runner affects. The cause is logged, not sent to the client."""
        self._has_failed = True
        affected = list(dict.fromkeys(groups))
        log.error("the model failed to %s; %d requests end", doing, len(affected), exc_info=fault)
        for group in reversed(affected):
            self._abort(group, FinishReason.ERROR, EngineFault(f"the model failed to {doing}"))

    def _vacate(self, sequence: Sequence) -> None:
        """Free a sequence's row; the sequence of the last row moves to it."""
        row = sequence.running_row()
        sequence.num_generated = self._rows.num_generated(row)
        self._rows.remove(row)

    # Report: metrics, and the pace of answers for the queue.

    def _report_end(
        self, group: SequenceGroup, reason: FinishReason, stage: SequenceState, events: list[TokenEvent]
    ) -> None:
        """Keep a finished group's events for its client, and report the end to metrics and queue."""
        timing = group.timing(self._clock())
        self._events += [(group.stream, event) for event in last_of(events, group, timing)]
        self._metrics.finished(reason, stage.value, timing, cause=group.cancel_cause, trace_id=group.request.trace_id)
        if reason in ANSWERED and timing.queued_s is not None and group.num_generated:
            self._queue.answered(timing.total_s - timing.queued_s, group.num_generated // group.num_rows)

    def _note_token_times(self, num_before: int, num_decoded: int) -> None:
        """Record a new token of each of the first rows.

        It is the first since they started for rows from `num_before` on, and for those that the last step left out.
        """
        now_s = self._clock()
        undecoded = [old for old in self._undecoded if old.row is not None and old.row < num_before]
        for sequence in (*undecoded, *self._rows.sequences[num_before:num_decoded]):
            group = sequence.group
            if group.first_token_s is None:
                group.first_token_s = now_s
                self._metrics.first_token(now_s - group.request.arrival_s, group.request.trace_id)
            elif group.preempted_s is not None:
                self._metrics.resumed(now_s - group.preempted_s)
                group.preempted_s = None
        self._undecoded = self._rows.sequences[num_decoded:]
        self._metrics.decoded(num_decoded, num_before - len(undecoded), now_s - self._last_decode_s)
        self._last_decode_s = now_s

    def _note_empty_rows(self) -> None:
        """Add up the time of the rows that this lane may fill and does not, while requests wait.

        Counts the time since the last call for the rows that were empty then.
        """
        num_before, since_s = self._num_empty, self._empty_since_s
        self._num_empty = self._budget.num_free(self._lane) if self._queue else 0
        self._empty_since_s = self._clock()
        if num_before:
            self._metrics.rows_stood_empty(num_before * (self._empty_since_s - since_s))

    def _report_occupancy(self) -> None:
        """Set the gauges of running requests and cache blocks if a number has changed."""
        num_groups = self._budget.num_groups
        current = (num_groups, self._cache.pool.num_free, self._cache.num_cross_blocks)
        if current != self._occupancy:
            self._metrics.occupied(num_groups, self._cache.use(self._runner.facts.cache_bytes_per_token))
            self._occupancy = current
