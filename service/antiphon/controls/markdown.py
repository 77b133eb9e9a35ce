"""Writes the tables of docs/CONTROLS.md from the table of controls: `python -m antiphon.controls.markdown FILE`."""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from pathlib import Path

from antiphon.controls.control import Control, Kind
from antiphon.controls.rules import RULES
from antiphon.controls.table import CONTROLS

_CONTROLS_HEADER = "| Control | Range | Default | Meaning | transformers |"
_RULES_HEADER = "| Control | Required value | Condition | Reason |"


def updated(document: str) -> str:
    """Return a document with the present tables of controls and of rules; the rest is unchanged."""
    rows = (
        (f"`{control.name}`", _range(control), _default(control), control.meaning, control.transformers)
        for control in CONTROLS
    )
    document = _with_rows(document, _CONTROLS_HEADER, rows)
    rules = ((f"`{rule.field}`", rule.allowed, rule.condition, rule.reason) for rule in RULES)
    return _with_rows(document, _RULES_HEADER, rules)


def _with_rows(document: str, header: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Return a document with other rows below one header. Raises ValueError if it has no such header."""
    before, heading, after = document.partition(f"{header}\n")
    if not heading:
        raise ValueError(f"the document has no table {header}")
    rule, *lines = after.splitlines(keepends=True)
    num_rows = next((index for index, line in enumerate(lines) if not line.startswith("|")), len(lines))
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return before + heading + rule + table + "".join(lines[num_rows:])


def _range(control: Control) -> str:
    """Return the values that a control can have, in words."""
    if control.range_text is not None:
        return control.range_text
    allowed = () if control.range is None else (control.range.allowed,)
    if control.max_entries is not None:
        return ", ".join((f"at most {control.max_entries:,} ids", *allowed))
    words = {Kind.TOKEN_ID: "an id", Kind.SWITCH: "true, false", Kind.CHOICE: ", ".join(control.choices)}
    return words[control.kind] if control.kind in words else ", ".join(allowed)


def _default(control: Control) -> str:
    """Return the value of an absent control, in words."""
    if control.default_text is not None:
        return control.default_text
    default = control.default
    if default is None or default == ():
        return "none"
    if isinstance(default, bool | enum.Enum):
        return str(getattr(default, "name", default)).lower()
    return f"{default:g}, off" if default == control.off else f"{default:g}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(updated(file.read_text(encoding="utf-8")), encoding="utf-8")
