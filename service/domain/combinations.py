"""Which decoding controls exclude each other: one table of rules, and the check that reads it.

A control counts as set where it differs from its default. What changes nothing is let through: top_k, top_p and min_p
keep the likeliest token whatever they are, so a greedy request may carry them.
docs/CONTROLS.md shows the table; a test holds it to this one.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.service.domain.errors import InvalidArgument

if TYPE_CHECKING:
    from antiphon.service.domain.request import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Controls:
    """All that one request sets: parameters, and what becomes a Request's own fields. None, or empty, is not set."""

    params: SamplingParams
    stop_strings: Sequence[str] = ()
    prefix_text: str | None = None
    prefix_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """`field` must be `allowed` where `condition` holds, because of `reason`; all in words, and `is_broken` in code."""

    field: str
    allowed: str
    condition: str
    reason: str
    is_broken: Callable[[SamplingParams, Controls], bool]


_DRAWS_NOTHING = "a beam search draws nothing"
_NO_HYPOTHESES = "without beams there are no hypotheses to compare"

RULES = (
    Rule("temperature", "0", "beam_width is above 1", _DRAWS_NOTHING, lambda p, _: _has_beams(p) and not p.is_greedy),
    Rule("top_k", "0", "beam_width is above 1", _DRAWS_NOTHING, lambda p, _: _has_beams(p) and p.top_k != 0),
    Rule("top_p", "1", "beam_width is above 1", _DRAWS_NOTHING, lambda p, _: _has_beams(p) and p.top_p != 1),
    Rule("min_p", "0", "beam_width is above 1", _DRAWS_NOTHING, lambda p, _: _has_beams(p) and p.min_p != 0),
    Rule("typical_p", "1", "beam_width is above 1", _DRAWS_NOTHING, lambda p, _: _has_beams(p) and p.typical_p != 1),
    Rule(
        "num_return_sequences",
        "at most beam_width",
        "beam_width is above 1",
        "a search keeps no more hypotheses than that",
        lambda p, _: _has_beams(p) and p.num_return_sequences > p.beam_width,
    ),
    Rule(
        "num_logprobs",
        "0 or absent",
        "beam_width is above 1",
        "the alternatives to a token are the other hypotheses",
        lambda p, _: _has_beams(p) and bool(p.num_logprobs),
    ),
    Rule(
        "stop_strings",
        "empty",
        "beam_width is above 1",
        "hypotheses end, and are compared, by tokens; stop_ids end them",
        lambda p, controls: _has_beams(p) and bool(controls.stop_strings),
    ),
    Rule(
        "num_return_sequences",
        "1",
        "beam_width is 1 and temperature is 0",
        "the outputs would be equal",
        lambda p, _: p.num_return_sequences > 1 and p.is_greedy and not _has_beams(p),
    ),
    Rule(
        "typical_p",
        "1",
        "temperature is 0",
        "it may exclude the likeliest token, which is the one that is taken",
        lambda p, _: p.typical_p != 1 and p.is_greedy,
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
        lambda p, _: p.early_stopping.name != "HEURISTIC" and not _has_beams(p),
    ),
    Rule(
        "min_new_tokens",
        "at most max_new_tokens",
        "max_new_tokens is set",
        "both could not hold",
        lambda p, _: p.max_new_tokens is not None and p.min_new_tokens > p.max_new_tokens,
    ),
    Rule(
        "forced_first_id",
        "none of suppressed_ids",
        "suppressed_ids is set",
        "both could not hold",
        lambda p, _: p.forced_first_id in p.suppressed_ids,
    ),
    Rule(
        "forced_first_id",
        "one of allowed_ids",
        "allowed_ids is set",
        "both could not hold",
        lambda p, _: p.forced_first_id is not None and bool(p.allowed_ids) and p.forced_first_id not in p.allowed_ids,
    ),
    Rule(
        "prefix_ids",
        "absent",
        "prefix_text is set",
        "they say the same thing",
        lambda _, controls: controls.prefix_text is not None and controls.prefix_ids is not None,
    ),
)


def check_combination(controls: Controls) -> None:
    """Raise InvalidArgument for the first broken rule, naming its field."""
    params = controls.params
    for rule in RULES:
        if rule.is_broken(params, controls):
            holder = params if hasattr(params, rule.field) else controls
            value = getattr(holder, rule.field)
            shown = value.name if isinstance(value, enum.Enum) else value
            raise InvalidArgument(rule.field, shown, f"{rule.allowed} where {rule.condition}: {rule.reason}")


def rules_as_markdown() -> str:
    """The table of docs/CONTROLS.md."""
    lines = ["| Control | must be | where | because |", "|---|---|---|---|"]
    lines += [f"| `{rule.field}` | {rule.allowed} | {rule.condition} | {rule.reason} |" for rule in RULES]
    return "\n".join(lines)


def _has_beams(params: SamplingParams) -> bool:
    return params.beam_width > 1
