"""Checks of token ids and of single sampling controls, by the ranges of the table.

`combinations.py` checks controls together.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.controls.control import Control, Kind, Range
from antiphon.controls.table import SAMPLING_CONTROLS, SamplingFields
from antiphon.domain.errors import InvalidArgument, InWords

FREE = ("max_new_tokens", "seed")
"""Controls that nearly every request sets. While all others have their defaults, no rule depends on them."""

_RANGES = tuple(
    (control.field, control.range)
    for control in SAMPLING_CONTROLS
    if control.range is not None and control.kind is not Kind.BIASES
)
_FREE_RANGES = tuple((field, one) for field, one in _RANGES if field in FREE)
_MAX_ENTRIES = tuple((one.field, one.max_entries) for one in SAMPLING_CONTROLS if one.max_entries is not None)
_BIASES = tuple(control for control in SAMPLING_CONTROLS if control.kind is Kind.BIASES)
_WITH_TOKEN_IDS = tuple(control for control in SAMPLING_CONTROLS if control.holds_token_ids)


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
    for field, one in ranges:
        value = getattr(params, field)
        if value is not None and not one.holds(value):
            raise InvalidArgument(field, value, one.allowed)


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
