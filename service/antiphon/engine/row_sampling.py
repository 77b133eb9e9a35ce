"""Sampling parameters of the rows, as arrays that the runner reads."""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.domain.request import Task
from antiphon.engine.logits_processors import NEUTRAL
from antiphon.engine.sequence import Sequence, SequenceGroup
from antiphon.ops.sampling import FLOAT_PARAMS, INT_PARAMS, as_float32, neutral_sampling, seed_of_output
from antiphon.runtime.runner import SamplingArrays

_float_values = attrgetter(*FLOAT_PARAMS)
_DEFAULTS = tuple(FLOAT_PARAMS.values())
_DEFAULT_ROW: NDArray[np.float32] = np.array(_DEFAULTS, np.float32)


class RowSampling:
    """Sampling parameters of max_rows rows."""

    def __init__(self, max_rows: int) -> None:
        self._sampling = neutral_sampling(max_rows)  # without edits of logits processors
        self._processed: list[Sequence] = []  # sequences with logits processors
        self._edited: tuple[SamplingArrays, SamplingArrays] | None = None  # without and with edits that stay the same

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Every array, with one entry for each row."""
        return (self._sampling.float_params, self._sampling.int_params)

    def fill(self, row: int, sequence: Sequence) -> None:
        """Write the parameters of a sequence that starts in a row."""
        group, arrays = sequence.group, self._sampling
        params, num_logprobs = group.request.params, group.request.num_logprobs
        if group.is_beam_search:
            num_logprobs = num_candidates(group)
        ints = {
            "top_k": params.top_k,
            "seed": _as_int64(seed_of_output(params.seed, sequence.index)),
            "forced_id": forced_id(sequence),
            "num_logprobs": -1 if num_logprobs is None else num_logprobs,
            "is_normalized": group.is_beam_search,
            "restriction": 0 if sequence.processors is None else sequence.processors.restriction,
        }
        values = _float_values(params)
        is_default = values == _DEFAULTS  # as for most requests
        arrays.float_params[row] = _DEFAULT_ROW if is_default else [as_float32(value) for value in values]
        arrays.int_params[row] = [ints[name] for name in INT_PARAMS]
        self._edited = None
        if sequence.processors is not None:
            self._processed.append(sequence)

    def is_forced(self, row: int) -> bool:
        """Return whether the row's first token is forced and not sampled."""
        return bool(self._sampling.ints("forced_id")[row] >= 0)

    def remove(self, sequence: Sequence) -> None:
        """Forget the logits processors of a sequence that leaves its row."""
        self._edited = None
        if sequence.processors is not None:
            self._processed.remove(sequence)

    def end_first_step(self, num_rows: int) -> None:
        """Let every row sample from now on: forced tokens are for a row's first step only."""
        self._sampling.ints("forced_id")[:num_rows] = -1

    def of_rows(self, num_rows: int, picks: NDArray[np.int32]) -> SamplingArrays:
        """Return one sample for each row, after the token picked for it; without edits."""
        arrays = self._sampling
        return SamplingArrays(
            picks=picks,
            float_params=arrays.float_params[:num_rows],
            int_params=arrays.int_params[:num_rows],
            edit_offsets=arrays.edit_offsets[: num_rows + 1],
            edit_ids=arrays.edit_ids,
            edit_values=arrays.edit_values,
        )

    def with_processors(self, sampling: SamplingArrays) -> SamplingArrays:
        """Return the same samples with the edits that logits processors make now."""
        if not self._processed:
            return sampling
        if self._edited is not None and self._edited[0] is sampling:
            return self._edited[1]
        counts = np.zeros(len(sampling), np.int32)
        ids, values = [], []
        for sequence in sorted(self._processed, key=Sequence.running_row):
            assert sequence.processors is not None
            edit_ids, edit_values = sequence.processors.current()
            counts[sequence.running_row()] = len(edit_ids)
            ids.append(edit_ids)
            values.append(edit_values)
        if any(map(len, values)):  # then neutral edits need values too
            values = [
                found if len(found) == len(own) else np.tile(NEUTRAL, (len(own), 1))
                for own, found in zip(ids, values, strict=True)
            ]
        offsets = np.zeros(len(sampling) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        edited = dataclasses.replace(
            sampling, edit_offsets=offsets, edit_ids=np.concatenate(ids), edit_values=np.concatenate(values)
        )
        is_constant = all(sequence.processors.is_constant for sequence in self._processed if sequence.processors)
        self._edited = (sampling, edited) if is_constant else None
        return edited


def with_scored(sampling: SamplingArrays, rows: list[int], picks: list[int], token_ids: list[int]) -> SamplingArrays:
    """Return the rows' samples followed by one for each scored token.

    rows: row whose parameters apply. picks: fed token before the scored one. token_ids: the scored tokens.
    """
    joined = dataclasses.replace(
        sampling,
        picks=np.concatenate((sampling.picks, np.array(picks, np.int32))),
        float_params=np.concatenate((sampling.float_params, sampling.float_params[rows])),
        int_params=np.concatenate((sampling.int_params, sampling.int_params[rows])),
        edit_offsets=np.concatenate((sampling.edit_offsets, np.full(len(picks), sampling.edit_offsets[-1], np.int32))),
    )
    joined.ints("forced_id")[len(sampling) :] = token_ids
    return joined


def _as_int64(seed: int) -> int:
    """Return the signed number with the same 64 bits as an unsigned one."""
    return seed - 2**64 if seed >= 2**63 else seed


def num_candidates(group: SequenceGroup) -> int:
    """Return the number of candidates that a beam search needs of each beam, and of all beams together.

    It suffices even if every end token and stop id is among the candidates of every beam.
    """
    params = group.request.params
    return params.beam_width * (2 + len(params.stop_ids))


def forced_id(sequence: Sequence) -> int:
    """Return the token that replaces the sequence's first sample; -1 if the first token is sampled."""
    request = sequence.group.request
    if request.task is Task.SCORE:
        return request.target_ids[-1]
    forced = request.params.forced_first_id
    return -1 if forced is None or sequence.produced or sequence.group.is_beam_search else forced
