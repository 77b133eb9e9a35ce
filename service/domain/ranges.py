"""What each decoding control may be by itself, as data; `combinations.py` says which exclude each other.

Every comparison is written so that NaN fails it.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_float
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from antiphon.service.domain.errors import InvalidArgument, InWords

if TYPE_CHECKING:
    from antiphon.service.domain.request import SamplingParams

MAX_SEED = 2**64 - 1
MAX_BEAM_WIDTH = 16
MAX_NUM_LOGPROBS = 20
MAX_BIAS = 1e6

# Entries that a list may hold.
LONGEST = {"logit_bias": 1024, "suppressed_ids": 1024, "allowed_ids": 1024, "stop_ids": 16}


@dataclass(frozen=True, slots=True)
class Range:
    """One control's range: in words, and as a test of its value."""

    field: str
    allowed: str
    holds: Callable[[Any], bool]


def _at_least(least: int, words: str | None = None) -> tuple[str, Callable[[Any], bool]]:
    return words or f"at least {least}", lambda value: value >= least


def _between(low: float, high: float) -> tuple[str, Callable[[Any], bool]]:
    return f"between {low:,} and {high:,}", lambda value: low <= value <= high


def _above_zero(high: float) -> tuple[str, Callable[[Any], bool]]:
    """Above 0 as the graphs read it, in 32 bits: what is 0 there would make a step fail for all its requests."""
    return f"above 0 and at most {high}", lambda value: 0.0 < value <= high and c_float(value).value > 0.0


RANGES = (
    Range("max_new_tokens", *_at_least(1)),
    Range("min_new_tokens", *_at_least(0, "0 (none) or more")),
    Range("time_limit_s", "above 0", lambda value: value > 0.0),
    Range("temperature", *_between(0, 100)),
    Range("top_k", *_at_least(0, "0 (off) or more")),
    Range("top_p", *_above_zero(1)),
    Range("seed", f"between 0 and {MAX_SEED}", lambda value: 0 <= value <= MAX_SEED),
    Range("min_p", *_between(0, 1)),
    Range("typical_p", *_above_zero(1)),
    Range("num_return_sequences", *_at_least(1)),
    Range("beam_width", *_between(1, MAX_BEAM_WIDTH)),
    Range("length_penalty", *_between(-10, 10)),
    Range("repetition_penalty", *_above_zero(100)),
    Range("presence_penalty", *_between(-100, 100)),
    Range("frequency_penalty", *_between(-100, 100)),
    Range("no_repeat_ngram_size", *_at_least(0, "0 (off) or more")),
    Range("num_logprobs", *_between(0, MAX_NUM_LOGPROBS)),
)


FREE = ("max_new_tokens", "seed")
"""Controls that nearly every request sets, and of which nothing else depends while the others are at their defaults."""
_FREE_RANGES = tuple(limit for limit in RANGES if limit.field in FREE)


def check_free(params: SamplingParams) -> None:
    """As check_ranges, where all controls other than FREE are at their defaults."""
    _check_ranges(params, _FREE_RANGES)


def check_ranges(params: SamplingParams) -> None:
    """Raise InvalidArgument for the first control outside its range, naming it; None is always inside."""
    _check_ranges(params, RANGES)
    for field, longest in LONGEST.items():
        if (length := len(getattr(params, field))) > longest:
            raise InvalidArgument(field, f"{length} entries long", f"at most {longest:,} entries long")
    _check_biases(params.logit_bias)


def _check_ranges(params: SamplingParams, ranges: tuple[Range, ...]) -> None:
    for limit in ranges:
        value = getattr(params, limit.field)
        if value is not None and not limit.holds(value):
            raise InvalidArgument(limit.field, value, limit.allowed)


def _check_biases(biases: tuple[tuple[int, float], ...]) -> None:
    if len({token_id for token_id, _ in biases}) < len(biases):
        raise InvalidArgument("logit_bias", biases, "one entry for a token id")
    for token_id, bias in biases:
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            allowed = f"between {-MAX_BIAS:,.0f} and {MAX_BIAS:,.0f} for each token id"
            raise InvalidArgument("logit_bias", InWords(f"{bias} for token id {token_id}"), allowed)


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidArgument for the first control that holds a token id outside the vocabulary, naming it."""
    forced = () if params.forced_first_id is None else (params.forced_first_id,)
    ids_of = {
        "logit_bias": tuple(token_id for token_id, _ in params.logit_bias),
        "forced_first_id": forced,
        "suppressed_ids": params.suppressed_ids,
        "allowed_ids": params.allowed_ids,
        "stop_ids": params.stop_ids,
    }
    for field, token_ids in ids_of.items():
        if token_ids:
            check_vocabulary(field, token_ids, vocab_size)


def check_vocabulary(field: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raise InvalidArgument naming the field where an id is not in the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        unknown = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidArgument(field, InWords(f"token id {unknown}"), f"of token ids from 0 to {vocab_size - 1}")
