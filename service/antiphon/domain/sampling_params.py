"""Sampling parameters of a request, and their checks by the table of controls: each alone, and all together."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

from antiphon.controls.control import Control, Kind, Range
from antiphon.controls.rules import RULES
from antiphon.controls.table import SAMPLING_CONTROLS, SamplingFields, TextFields
from antiphon.domain.errors import InvalidArgument, InWords

FREE = ("max_new_tokens", "seed")
"""Controls that nearly every request sets. While all others have their defaults, no rule depends on them."""

_RANGES = tuple(
    (control.field, control.range)
    for control in SAMPLING_CONTROLS
    if control.range is not None and control.kind is not Kind.BIASES
)
_FREE_RANGES = tuple((field, allowed) for field, allowed in _RANGES if field in FREE)
_MAX_ENTRIES = tuple(
    (control.field, control.max_entries) for control in SAMPLING_CONTROLS if control.max_entries is not None
)
_BIASES = tuple(control for control in SAMPLING_CONTROLS if control.kind is Kind.BIASES)
_WITH_TOKEN_IDS = tuple(control for control in SAMPLING_CONTROLS if control.holds_token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams(SamplingFields):
    """Sampling controls of one request, checked singly and in combination against the table.

    The fields are those of `antiphon.controls.table`. docs/CONTROLS.md gives the order of the steps.
    """

    def __post_init__(self) -> None:
        if _rare_values(self) == _RARE_DEFAULTS:  # true of most requests, which need only few checks
            check_free(self)
            return
        check_ranges(self)
        check_combination(Controls(params=self))

    @property
    def is_narrowed(self) -> bool:
        """True when every step searches the vocabulary for the tokens to sample from."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.typical_p < 1)

    @property
    def is_greedy(self) -> bool:
        """True when every token is the likeliest one."""
        return self.temperature == 0.0

    @property
    def num_rows(self) -> int:
        """Rows of the batch that a request takes: one for each beam or sample."""
        return self.beam_width if self.beam_width > 1 else self.num_return_sequences


@dataclass(frozen=True, kw_only=True, slots=True)
class Controls(TextFields):
    """All controls of one request: the sampling parameters, and the controls that need a tokenizer."""

    params: SamplingParams


_RARE_FIELDS = tuple(field for field in fields(SamplingParams) if field.name not in FREE)
_rare_values = attrgetter(*(field.name for field in _RARE_FIELDS))
_RARE_DEFAULTS = tuple(field.default for field in _RARE_FIELDS)


def check_free(params: SamplingFields) -> None:
    """Check the controls of FREE; sufficient if all others have their defaults."""
    _check_ranges(params, _FREE_RANGES)


def check_ranges(params: SamplingFields) -> None:
    """Raise InvalidArgument for the first control outside its range, naming it; None is always inside."""
    _check_ranges(params, _RANGES)
    for field, max_entries in _MAX_ENTRIES:
        if (length := len(getattr(params, field))) > max_entries:
            raise InvalidArgument(field, f"{length} entries long", f"at most {max_entries:,} entries long")
    for control in _BIASES:
        _check_biases(control, getattr(params, control.field))


def _check_ranges(params: SamplingFields, ranges: tuple[tuple[str, Range], ...]) -> None:
    for field, allowed in ranges:
        value = getattr(params, field)
        if value is not None and not allowed.holds(value):
            raise InvalidArgument(field, value, allowed.allowed)


def _check_biases(control: Control, biases: tuple[tuple[int, float], ...]) -> None:
    if len({token_id for token_id, _ in biases}) < len(biases):
        raise InvalidArgument(control.field, biases, "one entry for a token id")
    for token_id, bias in biases:
        if control.range is not None and not control.range.holds(bias):
            raise InvalidArgument(control.field, InWords(f"{bias} for token id {token_id}"), control.range.allowed)


def check_token_ids(params: SamplingFields, vocab_size: int) -> None:
    """Raise InvalidArgument for the first control that holds a token id outside the vocabulary, naming it."""
    for control in _WITH_TOKEN_IDS:
        value = getattr(params, control.field)
        if value is None or value == ():
            continue
        if control.kind is Kind.BIASES:
            value = tuple(token_id for token_id, _ in value)
        elif control.kind is Kind.TOKEN_ID:
            value = (value,)
        check_vocabulary(control.field, value, vocab_size)


def check_tokens(field: str, token_ids: Sequence[int], shortest: int, longest: int, vocab_size: int) -> None:
    """Raise InvalidArgument naming the field if there are too few or too many ids, or one is not in the vocabulary."""
    if not shortest <= len(token_ids) <= longest:
        raise InvalidArgument(field, InWords(f"{len(token_ids)} tokens long"), f"{shortest} to {longest} tokens long")
    check_vocabulary(field, token_ids, vocab_size)


def check_vocabulary(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidArgument naming the field if an id is not in the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        unknown = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidArgument(field, InWords(f"token id {unknown}"), f"of token ids from 0 to {vocab_size - 1}")


def check_combination(controls: Controls) -> None:
    """Raise InvalidArgument for the first broken rule, naming its field."""
    params = controls.params
    for rule in RULES:
        if rule.is_broken(params, controls):
            value = getattr(params if hasattr(params, rule.field) else controls, rule.field)
            shown = value.name if isinstance(value, enum.Enum) else value
            raise InvalidArgument(rule.field, shown, f"{rule.allowed} if {rule.condition}: {rule.reason}")
