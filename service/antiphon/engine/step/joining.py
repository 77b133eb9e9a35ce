"""Gives free rows to waiting requests: takes requests out of the queue, encodes their sources, starts their rows."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from antiphon.domain.request import EncoderOutputs
from antiphon.engine.scheduling.early import early_groups, may_encode_early
from antiphon.engine.scheduling.scheduler import MAX_DEFERRED_STEPS, schedule
from antiphon.engine.sequences.sequence import SequenceGroup, SequenceState, sequences_of
from antiphon.engine.step.drops import Drops
from antiphon.engine.step.endings import Endings
from antiphon.engine.step.parts import RunningState, StepParts
from antiphon.runtime.encoder_outputs import read_out
from antiphon.runtime.runner import EncodeReport

log = logging.getLogger(__name__)


class Joining:
    """Lets requests of the queue join the running ones."""

    def __init__(self, parts: StepParts, state: RunningState, endings: Endings, drops: Drops) -> None:
        self._parts = parts
        self._state = state
        self._endings = endings
        self._drops = drops
        self._num_deferred = 0

    def fill_rows(self) -> None:
        """Give free rows to outputs of running groups, to joining groups, and to the further outputs of these."""
        self._start_pending()
        if not self._state.turns.is_blocked:
            self._admit()
            self._start_pending()

    def wait_again(self, group: SequenceGroup) -> None:
        """Put a preempted group back into the queue before all new ones."""
        group.state, group.lane = SequenceState.WAITING, None
        self._parts.queue.put_back(group)

    def _start_pending(self) -> None:
        for group in self._state.turns.start_pending(self._parts.runner.facts.bos_id):
            self._state.beams.add(group)

    def _admit(self) -> None:
        parts, state = self._parts, self._state
        if not parts.queue or not (num_free := state.turns.num_free):
            return
        is_early = may_encode_early(parts.runner, parts.limits, len(parts.queue), is_contended=state.turns.is_contended)
        batch = schedule(
            state.turns.candidates(),
            num_running=parts.limits.max_num_seqs - num_free,
            num_free_blocks=state.reservations.num_admissible_blocks,
            limits=parts.limits,
            num_lanes=len(parts.lanes.states),
            num_deferred=MAX_DEFERRED_STEPS if state.turns.has_taken or is_early else self._num_deferred,
        )
        self._num_deferred = batch.num_deferred
        if batch.joining:
            now_s = parts.clock()
            for group in batch.joining:
                self._reserve(group, now_s)
            early = self._reserve_early(batch.joining, now_s) if is_early else ()
            self._start((*batch.joining, *early))

    def _reserve_early(self, joining: tuple[SequenceGroup, ...], now_s: float) -> tuple[SequenceGroup, ...]:
        """Take further groups out of the queue, to be encoded with those that join, and to wait for rows after that."""
        parts = self._parts
        groups = early_groups(
            parts.queue,
            joining,
            limits=parts.limits,
            num_lanes=len(parts.lanes.states),
            num_free_blocks=self._state.reservations.num_admissible_blocks,
            num_blocks=self._state.reservations.num_blocks,
        )
        for group in groups:
            self._reserve(group, now_s, is_early=True)
        return groups

    def _reserve(self, group: SequenceGroup, now_s: float, *, is_early: bool = False) -> None:
        """Take a group out of the queue, and blocks for it out of the pool; no rows if it is early."""
        parts, state = self._parts, self._state
        parts.queue.take(group.request_id, now_s)
        group.state, group.lane = SequenceState.ENCODING, state.index
        if group.admitted_s is None:
            group.ticket, group.admitted_s = next(parts.tickets), now_s
            group.sequences = sequences_of(group, parts.runner.facts.bos_id, parts.runner.facts.eos_id)
            parts.metrics.admitted(now_s - group.request.arrival_s, group.request.trace_id)
        group.take_first_rows(0 if is_early else group.num_first_rows)
        state.reservations.take(group)
        state.turns.joined(group)

    def _start(self, groups: tuple[SequenceGroup, ...]) -> None:
        """Encode the groups' sources if the model has an encoder, and give the groups their rows."""
        if self._parts.runner.facts.has_encoder:
            self._encode(groups)
            return
        self._parts.metrics.prompted(sum(group.request.num_source_tokens for group in groups))
        self._append(groups)

    def _encode(self, groups: tuple[SequenceGroup, ...]) -> None:
        try:
            report, readouts = self._run_encoder(groups)
        except Exception as fault:
            if len(groups) == 1:
                self._endings.fail(groups, "encode", fault)
                return
            log.warning("encoding %d sources together failed; trying each alone", len(groups), exc_info=fault)
            for group in groups:
                self._encode((group,))
            return
        self._parts.metrics.encoded(report, sum(group.source_len for group in groups))
        self._drops.drop_encoded(groups)
        self._append(groups)
        for group in groups:
            if group.request_id in readouts:
                self._endings.end_encoded(group, readouts[group.request_id])

    def _run_encoder(self, groups: tuple[SequenceGroup, ...]) -> tuple[EncodeReport, dict[str, EncoderOutputs]]:
        """Encode the groups' sources together. Return the cost, and the requested encoder outputs by request id."""
        runner = self._parts.runner
        requests = [group.request for group in groups]
        sources = [request.source_ids for request in requests]
        tables = [group.cross_block_table for group in groups]
        types = [request.type_ids for request in requests]
        is_read = any(not request.has_target for request in requests)
        with self._parts.computing():
            report = runner.encode(sources, tables, type_ids=types, keep_memory=is_read)
            readouts = read_out(requests, report.memory, runner) if report.memory is not None else {}
        return report, readouts

    def _append(self, groups: Iterable[SequenceGroup]) -> None:
        """Give rows to the groups that have not ended meanwhile."""
        state = self._state
        joining = [group for group in groups if group.state is not SequenceState.FINISHED]
        for group in joining:
            group.state = SequenceState.RUNNING
        state.rows.append((one for group in joining for one in group.starting), self._parts.runner.facts.bos_id)
        for group in joining:
            state.turns.started(group)
            if group.is_beam_search and group.starting:
                state.beams.add(group)
