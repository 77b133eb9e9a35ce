"""Decodes one token for every row, and separates tokens to stream from outputs that end."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from antiphon.engine.sequences.sequence import SequenceGroup, SequenceState
from antiphon.engine.sequences.stream import TokenSink
from antiphon.engine.sequences.unread_tokens import Item
from antiphon.engine.step.commit import commit
from antiphon.engine.step.endings import Endings
from antiphon.engine.step.parts import RunningState, StepParts
from antiphon.engine.step.token_times import TokenTimes
from antiphon.runtime.runner import NOT_FINITE, Samples


class StepTokens(NamedTuple):
    """Tokens of one step to stream: items[i] for sinks[i]. has_decoded: at least one row received a valid token."""

    sinks: tuple[TokenSink, ...] = ()
    items: SequenceABC[Item] = ()
    has_decoded: bool = False


class Decoding:
    """Decodes the rows of an engine, one token per step."""

    def __init__(self, parts: StepParts, state: RunningState, endings: Endings) -> None:
        self._runner = parts.runner
        self._computing = parts.computing
        self._rows = state.rows
        self._beams = state.beams
        self._endings = endings
        self._token_times = TokenTimes(state.rows, parts.metrics, parts.clock)

    def decode(self, num_before: int) -> StepTokens:
        """Decode every row; rows from `num_before` on decode for the first time. Return the tokens to stream."""
        rows = self._rows
        if not rows:
            return StepTokens()
        try:
            batch = rows.batch()
            with self._computing():
                samples = self._runner.decode(batch)
            finished = self._beams.advance(samples) if len(self._beams) else []
        except Exception as fault:
            self._endings.fail([one.group for one in rows.sequences], "decode", fault)
            return StepTokens()
        token_ids = samples.token_ids[: len(rows)]
        is_invalid: NDArray[np.bool_] = token_ids == NOT_FINITE
        has_decoded = not is_invalid.all()
        rows.advance(token_ids)
        self._token_times.note(num_before)
        if rows.num_beams:
            return self._commit_beams(samples, finished, is_invalid)._replace(has_decoded=has_decoded)
        return StepTokens(*self._commit(samples), has_decoded)

    def _commit(self, samples: Samples) -> tuple[tuple[TokenSink, ...], list[Item]]:
        """End the outputs that are finished; returns the other rows' sinks and tokens."""
        committed = commit(self._rows, samples, self._runner.facts.eos_id)
        # From the last row down, so that the row that moves into a freed one is a row that continues.
        for ended in committed.ended:
            self._endings.end_output(ended)
        return committed.sinks, committed.items

    def _commit_beams(
        self, samples: Samples, finished: list[SequenceGroup], is_invalid: NDArray[np.bool_]
    ) -> StepTokens:
        """End outputs and searches that are finished, where some rows are beams; returns the tokens to stream."""
        rows = self._rows
        failed = np.flatnonzero(is_invalid & rows.is_beam[: len(rows)]).tolist() if is_invalid.any() else []
        invalid = dict.fromkeys(rows.sequences[row].group for row in failed)
        beam_sinks, beam_items = self._beams.common_tokens()
        sinks, items = self._commit(samples) if rows.num_beams < len(rows) else ((), [])
        for group in invalid:
            self._endings.end_invalid(group)
        for group in finished:
            if group.state is not SequenceState.FINISHED:
                self._endings.end_search(group)
        return StepTokens((*sinks, *beam_sinks), [*items, *beam_items])
