"""Combinations of controls that are refused: one rule for each combination.

A control is set if it differs from its default. Controls without effect are accepted: top_k, top_p and min_p
keep the likeliest token at every value, so a greedy request may set them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from antiphon.controls.control import Control
from antiphon.controls.table import SAMPLING_CONTROLS, EarlyStopping, SamplingFields, TextFields


@dataclass(frozen=True, slots=True)
class Rule:
    """`field` must be `allowed` if `condition` is true, because of `reason`, all in words; `is_broken` is the test."""

    field: str
    allowed: str
    condition: str
    reason: str
    is_broken: Callable[[SamplingFields, TextFields], bool]


_NO_HYPOTHESES = "without beams there are no hypotheses to compare"


def _has_beams(params: SamplingFields) -> bool:
    return params.beam_width > 1


def _is_greedy(params: SamplingFields) -> bool:
    return params.temperature == 0


def _is_off_with_beams(control: Control) -> Rule:
    """Return the rule that every control of sampling has."""
    return Rule(
        control.field,
        f"{control.default:g}",
        "beam_width is above 1",
        "a beam search does not sample",
        lambda p, _: _has_beams(p) and bool(getattr(p, control.field) != control.default),
    )


RULES = (
    *(_is_off_with_beams(control) for control in SAMPLING_CONTROLS if control.is_for_sampling),
    Rule(
        "num_return_sequences",
        "at most beam_width",
        "beam_width is above 1",
        "a search keeps at most beam_width hypotheses",
        lambda p, _: _has_beams(p) and p.num_return_sequences > p.beam_width,
    ),
    Rule(
        "num_logprobs",
        "0 or absent",
        "beam_width is above 1",
        "a beam search returns other hypotheses instead of alternative tokens",
        lambda p, _: _has_beams(p) and bool(p.num_logprobs),
    ),
    Rule(
        "stop_strings",
        "empty",
        "beam_width is above 1",
        "a beam search ends hypotheses by tokens; use stop_ids",
        lambda p, texts: _has_beams(p) and bool(texts.stop_strings),
    ),
    Rule(
        "num_return_sequences",
        "1",
        "beam_width is 1 and temperature is 0",
        "the outputs would be equal",
        lambda p, _: p.num_return_sequences > 1 and _is_greedy(p) and not _has_beams(p),
    ),
    Rule(
        "typical_p",
        "1",
        "temperature is 0",
        "it can exclude the most likely token, which temperature 0 chooses",
        lambda p, _: p.typical_p != 1 and _is_greedy(p),
    ),
    Rule(
        "length_penalty",
        "1",
        "beam_width is 1",
        _NO_HYPOTHESES,
        lambda p, _: p.length_penalty != 1 and not _has_beams(p),
    ),
    Rule(
        "early_stopping",
        "EARLY_STOPPING_HEURISTIC, the default",
        "beam_width is 1",
        _NO_HYPOTHESES,
        lambda p, _: p.early_stopping is not EarlyStopping.HEURISTIC and not _has_beams(p),
    ),
    Rule(
        "min_new_tokens",
        "at most max_new_tokens",
        "max_new_tokens is set",
        "otherwise the two contradict each other",
        lambda p, _: p.max_new_tokens is not None and p.min_new_tokens > p.max_new_tokens,
    ),
    Rule(
        "forced_first_id",
        "none of suppressed_ids",
        "suppressed_ids is set",
        "otherwise the two contradict each other",
        lambda p, _: p.forced_first_id in p.suppressed_ids,
    ),
    Rule(
        "forced_first_id",
        "one of allowed_ids",
        "allowed_ids is set",
        "otherwise the two contradict each other",
        lambda p, _: p.forced_first_id is not None and bool(p.allowed_ids) and p.forced_first_id not in p.allowed_ids,
    ),
    Rule(
        "use_shortlist",
        "false",
        "allowed_ids is set",
        "both list the tokens that can be chosen",
        lambda p, _: p.use_shortlist and bool(p.allowed_ids),
    ),
    Rule(
        "prefix_ids",
        "absent",
        "prefix_text is set",
        "both set the first target tokens",
        lambda _, texts: texts.prefix_text is not None and texts.prefix_ids is not None,
    ),
)
