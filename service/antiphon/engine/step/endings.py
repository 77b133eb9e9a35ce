"""Ends outputs and requests: frees their rows and blocks, and makes their terminal events."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from antiphon.domain.errors import AntiphonError, EngineFault
from antiphon.domain.request import ANSWERED, EncoderOutputs, FinishReason, TokenEvent
from antiphon.engine.sequences.sequence import Sequence, SequenceGroup, SequenceState
from antiphon.engine.sequences.stream import OutputStream
from antiphon.engine.step.commit import Ended
from antiphon.engine.step.parts import RunningState, StepParts
from antiphon.engine.step.terminal_events import beam_events, last_of, output_event

log = logging.getLogger(__name__)


class Endings:
    """Ends outputs and requests. Everything that a request holds is freed here.

    has_failed: the runner failed, or returned no valid token, since this was last set to False.
    """

    def __init__(self, parts: StepParts, state: RunningState) -> None:
        self._parts = parts
        self._state = state
        self._events: list[tuple[OutputStream, TokenEvent]] = []
        self.has_failed = False

    def take_events(self) -> list[tuple[OutputStream, TokenEvent]]:
        """Return the terminal events made since the last call, each with its stream."""
        events, self._events = self._events, []
        return events

    def close(self, group: SequenceGroup, reason: FinishReason, events: list[TokenEvent]) -> None:
        """End a request with its last events, and free its queue place, rows and blocks. Later calls do nothing."""
        if group.state is SequenceState.FINISHED:
            return
        stage = group.state
        group.state = SequenceState.FINISHED
        group.stream.end_reason = reason
        self._release(group)
        if not group.is_beam_search:
            group.num_generated = sum(sequence.num_generated for sequence in group.sequences)
        if stage is not SequenceState.WAITING:
            self._state.reservations.give_back(group)
        del self._parts.live[group.request_id]
        self._report(group, reason, stage, events)
        # A group and its sequences refer to each other: together they would wait for the garbage collector.
        group.sequences = group.starting = ()
        group.pending = []

    def end_encoded(self, group: SequenceGroup, readout: EncoderOutputs) -> None:
        """End a group that needs only outputs of its encoded source."""
        reason = FinishReason.STOP
        event = TokenEvent(request_id=group.request_id, finish_reason=reason, is_last=True, encoder_outputs=readout)
        self.close(group, reason, [event])

    def end_output(self, ended: Ended) -> None:
        """End one output of a request, and the request with its last output."""
        sequence, group = ended.sequence, ended.sequence.group
        if group.state is SequenceState.FINISHED:
            return
        if ended.reason is FinishReason.ERROR:
            self.end_invalid(group)
            return
        self.vacate(sequence)
        sequence.is_finished = True
        group.num_finished += 1
        event = output_event(sequence, ended.reason, ended.logprobs)
        if group.num_finished == group.num_rows:
            self.close(group, ended.reason, [event])
        else:
            self._state.reservations.give_back_output(sequence)
            self._events.append((group.stream, event))

    def end_search(self, group: SequenceGroup, reason: FinishReason | None = None) -> None:
        """End a beam search with its best hypotheses. With a reason, its live beams become hypotheses too."""
        found, num_streamed = self._state.beams.hypotheses(group, reason)
        group.num_generated = sum(len(one.token_ids) for one in found)
        group.beam_steps = self._state.beams.steps(group)
        events = beam_events(group, found, num_streamed, reason)
        self.close(group, events[0].finish_reason or FinishReason.STOP, events)

    def end_invalid(self, group: SequenceGroup) -> None:
        """End a request for which the model returned no valid token."""
        self.has_failed = True
        log.error("request %s: the model's logits are not finite", group.request_id)
        self.refuse(group, FinishReason.ERROR, EngineFault("the model produced no valid token"))

    def fail(self, groups: Iterable[SequenceGroup], doing: str, fault: Exception) -> None:
        """End the groups that a fault of the runner affects. The cause is logged, not sent to the client."""
        self.has_failed = True
        affected = list(dict.fromkeys(groups))
        log.error("the model failed to %s; %d requests end", doing, len(affected), exc_info=fault)
        for group in reversed(affected):
            self.refuse(group, FinishReason.ERROR, EngineFault(f"the model failed to {doing}"))

    def refuse(self, group: SequenceGroup, reason: FinishReason, error: AntiphonError | None = None) -> None:
        """End a request without its outputs."""
        event = TokenEvent(request_id=group.request_id, finish_reason=reason, is_last=True, error=error)
        self.close(group, reason, [event])

    def vacate(self, sequence: Sequence) -> None:
        """Free a sequence's row; the sequence of the last row moves to it."""
        rows, row = self._state.rows, sequence.row
        assert row is not None
        sequence.num_generated = rows.num_generated(row)
        rows.remove(row)

    def _release(self, group: SequenceGroup) -> None:
        self._parts.queue.remove(group.request_id)
        self._state.turns.left(group)
        self._state.beams.remove(group)
        # From the last row down, so that the row that moves into a freed one is never one of these.
        for sequence in sorted(group.sequences, key=lambda one: -1 if one.row is None else -one.row):
            if sequence.row is not None:
                self.vacate(sequence)

    def _report(
        self, group: SequenceGroup, reason: FinishReason, stage: SequenceState, events: list[TokenEvent]
    ) -> None:
        """Keep a finished group's events for its client, and report the end to metrics and queue."""
        timing = group.timing(self._parts.clock())
        self._events += [(group.stream, event) for event in last_of(events, group, timing)]
        self._parts.metrics.finished(
            reason, stage.value, timing, cause=group.cancel_cause, trace_id=group.request.trace_id
        )
        if reason in ANSWERED and timing.queued_s is not None and group.num_generated:
            self._parts.queue.answered(timing.total_s - timing.queued_s, group.num_generated // group.num_rows)
