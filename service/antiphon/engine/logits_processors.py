"""Penalties and constraints of one sequence, as a short list of tokens whose logits change.

Each edit is (bias, penalty, shift) of a token id, as `SamplingArrays` describes them. Together they have the effect of
transformers' logits processors in their order: sequence bias, repetition penalty, n-grams, minimal length, suppressed
tokens; presence and frequency penalties come after the repetition penalty.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from antiphon.domain.sampling_params import SamplingParams
from antiphon.ops.sampling import EDITED_ONLY, OWN_VOCABULARY

NEUTRAL: NDArray[np.float32] = np.array((0.0, 1.0, 0.0), np.float32)
"""Values of an edit that changes nothing."""
_FORBIDDEN = (0.0, 1.0, -np.inf)


class LogitsProcessors:
    """Logits processors of one sequence, updated with every token.

    Their cost grows with the tokens that have an edit, not with the tokens produced.
    restriction: as the parameter of this name in SamplingArrays.
    is_constant: True if no token changes the edits.
    is_neutral: True if the edits only list the tokens of a vocabulary, so that they have no values.
    """

    def __init__(
        self,
        params: SamplingParams,
        decoder_input_ids: Iterable[int],
        eos_id: int,
        candidate_ids: NDArray[np.int32] | None = None,
    ) -> None:
        """decoder_input_ids: tokens before the first produced one: the begin token and the prefix.

        candidate_ids: as in Request.
        """
        self.restriction = EDITED_ONLY if params.allowed_ids else 0
        if candidate_ids is not None:
            self.restriction = OWN_VOCABULARY
        self.is_constant = not (
            params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
            or params.no_repeat_ngram_size
            or params.min_new_tokens
        )
        self._params = params
        self._end_ids = (eos_id, *params.stop_ids)
        self._ids = np.zeros(32, np.int32)
        self._values = np.zeros((32, 3), np.float32)
        self._slots: dict[int, int] = {}
        self._tail: tuple[int, ...] = ()  # the last n - 1 tokens
        self._followers: dict[tuple[int, ...], tuple[int, ...]] = {}  # for n - 1 tokens, every token that followed them
        self._num_produced = 0
        self.is_neutral = candidate_ids is not None and not self._has_edits(params)
        if candidate_ids is not None:
            self._ids = candidate_ids.astype(np.int32, copy=False)
        if self.is_neutral:
            self._values = np.zeros((0, 3), np.float32)
        elif candidate_ids is not None:
            self._values = np.tile(NEUTRAL, (len(candidate_ids), 1))
            self._slots = dict(zip(candidate_ids.tolist(), range(len(candidate_ids)), strict=True))
        self._fill(eos_id)
        for token_id in decoder_input_ids:
            self._remember(token_id)

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        decoder_input_ids: Iterable[int],
        eos_id: int,
        candidate_ids: NDArray[np.int32] | None = None,
    ) -> LogitsProcessors | None:
        """Return the logits processors that the parameters need; None if they need none."""
        is_edited = candidate_ids is not None or cls._has_edits(params)
        return cls(params, decoder_input_ids, eos_id, candidate_ids) if is_edited else None

    @staticmethod
    def _has_edits(params: SamplingParams) -> bool:
        """Return whether the parameters change the logits of some tokens."""
        return bool(
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or params.no_repeat_ngram_size
            or params.min_new_tokens
            or params.logit_bias
            or params.suppressed_ids
            or params.allowed_ids
            or params.ignore_eos
        )

    def push(self, token_id: int) -> None:
        """Update the edits with the token that was sampled."""
        self._num_produced += 1
        self._remember(token_id)
        params = self._params
        if params.presence_penalty or params.frequency_penalty:
            is_new = (slot := self._slot(token_id)) is not None and token_id not in self._produced
            self._produced.add(token_id)
            if slot is not None:
                self._values[slot, 2] -= params.frequency_penalty + (params.presence_penalty if is_new else 0.0)

    def current(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return ids [E] and values [E, 3] of the edits of the next sample: views, valid until any method is called.

        Neutral edits have no values: [0, 3].
        """
        if self.is_neutral:
            return self._ids, self._values
        count = len(self._slots)
        for token_id in self._forbidden_now():
            if self.restriction and token_id not in self._slots:
                continue  # excluded already; an edit would allow it
            self._write(count, token_id, _FORBIDDEN)
            count += 1
        return self._ids[:count], self._values[:count]

    def fork(self) -> LogitsProcessors:
        """Return an independent copy."""
        copy = object.__new__(LogitsProcessors)
        copy.__dict__.update(self.__dict__)
        copy._ids, copy._values = self._ids.copy(), self._values.copy()
        copy._slots, copy._followers = self._slots.copy(), self._followers.copy()
        copy._produced = self._produced.copy()
        return copy

    def _fill(self, eos_id: int) -> None:
        params = self._params
        self._produced: set[int] = set()
        if params.allowed_ids:
            for token_id in (*params.allowed_ids, eos_id):
                self._add(token_id)
        for token_id, bias in params.logit_bias:
            if (slot := self._slot(token_id)) is not None:
                self._values[slot, 0] = bias
        for token_id in (*params.suppressed_ids, *((eos_id,) if params.ignore_eos else ())):
            if (slot := self._slot(token_id)) is not None:
                self._values[slot, 2] = -np.inf

    def _remember(self, token_id: int) -> None:
        """Update the edits that count tokens of the prefix as well as produced ones."""
        params = self._params
        if params.repetition_penalty != 1.0 and (slot := self._slot(token_id)) is not None:
            self._values[slot, 1] = params.repetition_penalty
        if params.no_repeat_ngram_size:
            width = params.no_repeat_ngram_size - 1
            if len(self._tail) == width:
                self._followers[self._tail] = (*self._followers.get(self._tail, ()), token_id)
            self._tail = (*self._tail, token_id)[-width:] if width else ()

    def _forbidden_now(self) -> Iterable[int]:
        params = self._params
        if self._num_produced < params.min_new_tokens:
            yield from self._end_ids
        if params.no_repeat_ngram_size and len(self._tail) == params.no_repeat_ngram_size - 1:
            yield from self._followers.get(self._tail, ())

    def _slot(self, token_id: int) -> int | None:
        """Return the index of a token's edit, a new one if it has none; None if that would allow an excluded token."""
        slot = self._slots.get(token_id)
        if slot is not None or self.restriction:
            return slot
        return self._add(token_id)

    def _add(self, token_id: int) -> int:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._slots) - 1:
            self._write(slot, token_id, (0.0, 1.0, 0.0))
        return slot

    def _write(self, slot: int, token_id: int, values: tuple[float, float, float]) -> None:
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._values = np.concatenate((self._values, np.zeros_like(self._values)))
        self._ids[slot] = token_id
        self._values[slot] = values
