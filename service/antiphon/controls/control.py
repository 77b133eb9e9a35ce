"""Types of the table of controls: the kind of a value, its range, and one row."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from ctypes import c_float
from dataclasses import dataclass
from typing import Any


class Kind(enum.Enum):
    """Type of a control's value."""

    WHOLE_NUMBER = enum.auto()
    NUMBER = enum.auto()
    SWITCH = enum.auto()
    CHOICE = enum.auto()  # one member of an enum
    TOKEN_ID = enum.auto()
    TOKEN_IDS = enum.auto()
    BIASES = enum.auto()  # numbers by token id
    TEXT = enum.auto()
    TEXTS = enum.auto()


@dataclass(frozen=True, slots=True)
class Range:
    """Values that a control can have: in words, and as a test of one value. Every test refuses NaN."""

    allowed: str
    holds: Callable[[Any], bool]


def at_least(least: int, *, words: str | None = None) -> Range:
    """Return the range from `least` upwards. words: text of an error instead of "at least"."""
    return Range(words or f"at least {least}", lambda value: value >= least)


def between(low: float, high: float) -> Range:
    """Return the range from low to high, both included."""
    return Range(f"between {low:,} and {high:,}", lambda value: low <= value <= high)


def above_zero(high: float) -> Range:
    """Return the range above 0 up to high.

    A value must be above 0 in 32 bits, because the graphs read 32 bits, and a 0 makes a step fail for all its requests.
    """
    return Range(f"above 0 and at most {high}", lambda value: 0.0 < value <= high and c_float(value).value > 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """One row of the table.

    name: field of GenerateOptions, option of the client, parameter of the Open Inference Protocol, and flag.
    field: name of the value inside the service, if its unit differs.
    meaning: one description for the documentation and for the flag's help.
    range: range of the value inside the service, or of each bias; None if the kind is enough.
    range_text: text of the documentation instead of the words of `range`.
    max_entries: of a list or a map.
    default, default_text: value of an absent control, and the text of the documentation if the value is not enough.
    off: neutral value, which changes nothing; None if there is no such value.
    is_for_sampling: True for controls of sampling, which a beam search refuses.
    metavar: placeholder of the value in the flag's help; None is that of the kind.
    transformers: name of its counterpart in transformers.
    """

    name: str
    field: str
    kind: Kind
    meaning: str
    range: Range | None = None
    range_text: str | None = None
    max_entries: int | None = None
    default: Any = None
    default_text: str | None = None
    off: Any = None
    is_for_sampling: bool = False
    metavar: str | None = None
    transformers: str = "none"

    @property
    def choices(self) -> tuple[str, ...]:
        """Names of the values of a CHOICE: those of its enum, in lower case."""
        return tuple(member.name.lower() for member in type(self.default)) if self.kind is Kind.CHOICE else ()

    @property
    def holds_token_ids(self) -> bool:
        """True if its values must be ids of the vocabulary."""
        return self.kind in (Kind.TOKEN_ID, Kind.TOKEN_IDS, Kind.BIASES)


def control(default: Any, kind: Kind, meaning: str, **row: Any) -> Any:
    """Return a dataclass field with this default and the rest of its row as metadata.

    row: the other fields of Control; `name` only if it differs from the field's.
    """
    return dataclasses.field(default=default, metadata=dict(row, kind=kind, meaning=meaning))


def rows_of(table: Any) -> tuple[Control, ...]:
    """Return a Control for each field of a dataclass whose fields `control` made."""
    return tuple(
        Control(**{"name": field.name, **field.metadata}, field=field.name, default=field.default)
        for field in dataclasses.fields(table)
    )
