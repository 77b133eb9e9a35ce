"""Sampling parameters of the rows, as arrays that the runner reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.model.ops.choices import PER_CHOICE, neutral_choices
from antiphon.model.ops.counter_random import seed_of_output
from antiphon.service.engine.batch.first_input import forced_id
from antiphon.service.engine.sequence import Sequence, SequenceGroup
from antiphon.service.runtime.runner import Choices

_MAX_TOP_K = 2**31 - 1
# Parameters become float32. Smaller positive values are raised to this one, because 0 has another meaning.
_TINY = float(np.finfo(np.float32).tiny)


class RowSampling:
    """Sampling parameters of max_rows rows.

    choices: one entry for each row, without edits of logits processors.
    """

    def __init__(self, max_rows: int) -> None:
        self.choices = neutral_choices(max_rows)
        self._processed: list[Sequence] = []  # sequences with logits processors

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Every array, with one entry for each row."""
        return tuple(getattr(self.choices, name) for name in PER_CHOICE)

    def fill(self, row: int, sequence: Sequence) -> None:
        """Write the parameters of a sequence that starts in a row."""
        params, choices = sequence.group.request.params, self.choices
        choices.temperatures[row] = max(params.temperature, _TINY) if params.temperature else 0.0
        choices.top_ks[row] = min(params.top_k, _MAX_TOP_K)
        choices.top_ps[row] = max(params.top_p, _TINY)
        choices.min_ps[row] = params.min_p
        choices.typical_ps[row] = max(params.typical_p, _TINY)
        choices.seeds[row] = seed_of_output(params.seed, sequence.index)
        choices.given_ids[row] = forced_id(sequence)
        num_logprobs = sequence.group.request.num_logprobs
        choices.num_logprobs[row] = -1 if num_logprobs is None else num_logprobs
        choices.is_normalized[row] = choices.is_exclusive[row] = 0
        if sequence.processors is not None:
            choices.is_exclusive[row] = sequence.processors.is_exclusive
            self._processed.append(sequence)
        if sequence.group.is_beam_search:
            choices.is_normalized[row] = 1
            choices.num_logprobs[row] = num_candidates(sequence.group)

    def is_forced(self, row: int) -> bool:
        """Return whether the row's first token is forced and not sampled."""
        return bool(self.choices.given_ids[row] >= 0)

    def remove(self, sequence: Sequence) -> None:
        """Forget the logits processors of a sequence that leaves its row."""
        if sequence.processors is not None:
            self._processed.remove(sequence)

    def end_first_step(self, num_rows: int) -> None:
        """Let every row sample from now on: only the first token of a row is forced."""
        self.choices.given_ids[:num_rows] = -1

    def of_rows(self, num_rows: int, picks: NDArray[np.int32]) -> Choices:
        """Return the sampling parameters of the rows, each for the token after its pick, without logits processors."""
        choices = self.choices
        taken = {name: getattr(choices, name)[:num_rows] for name in PER_CHOICE}
        return Choices(
            **taken | {"picks": picks},
            edit_offsets=choices.edit_offsets[: num_rows + 1],
            edit_ids=choices.edit_ids,
            edit_values=choices.edit_values,
        )

    def with_processors(self, choices: Choices) -> Choices:
        """Return the same parameters with the present edits of the logits processors."""
        if not self._processed:
            return choices
        counts = np.zeros(len(choices), np.int32)
        ids, values = [], []
        for sequence in sorted(self._processed, key=Sequence.running_row):
            assert sequence.processors is not None
            edit_ids, edit_values = sequence.processors.current()
            counts[sequence.running_row()] = len(edit_ids)
            ids.append(edit_ids)
            values.append(edit_values)
        offsets = np.zeros(len(choices) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        return dataclasses.replace(
            choices, edit_offsets=offsets, edit_ids=np.concatenate(ids), edit_values=np.concatenate(values)
        )


def with_scored(choices: Choices, rows: list[int], picks: list[int], token_ids: list[int]) -> Choices:
    """Return the parameters of the rows followed by those of each scored token.

    rows: row whose parameters apply. picks: fed token before the scored one. token_ids: the scored tokens.
    """
    added = {name: getattr(choices, name)[rows] for name in PER_CHOICE}
    added |= {"picks": np.array(picks, np.int32), "given_ids": np.array(token_ids, np.int64)}
    joined = {name: np.concatenate((getattr(choices, name), array)) for name, array in added.items()}
    no_edits = np.zeros(len(picks), np.int32)
    return dataclasses.replace(choices, **joined, edit_offsets=np.concatenate((choices.edit_offsets, no_edits)))


def num_candidates(group: SequenceGroup) -> int:
    """Return the number of candidates that a beam search needs of each beam, and of all beams together.

    It suffices even if every end token and stop id is among the candidates of every beam.
    """
    params = group.request.params
    return params.beam_width * (2 + len(params.stop_ids))
