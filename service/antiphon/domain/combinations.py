"""Check of the sampling controls of one request together, by the rules of `antiphon.controls.rules`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from antiphon.controls.rules import RULES
from antiphon.controls.table import TextFields
from antiphon.domain.errors import InvalidArgument

if TYPE_CHECKING:
    from antiphon.domain.request import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class Controls(TextFields):
    """All controls of one request: the sampling parameters, and the controls that need a tokenizer."""

    params: SamplingParams


def check_combination(controls: Controls) -> None:
    """Raise InvalidArgument for the first broken rule, naming its field."""
    params = controls.params
    for rule in RULES:
        if rule.is_broken(params, controls):
            value = getattr(params if hasattr(params, rule.field) else controls, rule.field)
            shown = value.name if isinstance(value, enum.Enum) else value
            raise InvalidArgument(rule.field, shown, f"{rule.allowed} if {rule.condition}: {rule.reason}")
