"""Flags with the names of the controls of the table, and the server's refusals with the names of flags."""

from __future__ import annotations

import argparse
import re
from typing import Any

from antiphon.client.options import Options
from antiphon.controls.control import Control, Kind
from antiphon.controls.table import CONTROLS

# Beginning of a refusal of a flag's value; languages are fields of the request, not of its options.
_OPTION = re.compile(r"^(?:options\.)?((?<=options\.)\w+|(?:source|target)_language\b)")


def add_option_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each control of the table; the value of an absent flag is None."""
    group = parser.add_argument_group(
        "decoding controls",
        "ID,..., ID=X and --stop-strings may be repeated; several outputs are printed one a line, and log-probabilities"
        " with --json; docs/CONTROLS.md describes them all",
    )
    for control in CONTROLS:
        group.add_argument(_flag(control.name), help=_help(control), **_type_of(control))


def _type_of(control: Control) -> dict[str, Any]:
    """Return the arguments of add_argument for a flag with values of the control's kind."""
    match control.kind:
        case Kind.NUMBER:
            return dict(type=float, metavar=control.metavar or "X")
        case Kind.TOKEN_ID:
            return dict(type=int, metavar="ID")
        case Kind.TOKEN_IDS:
            return dict(type=_ids, action="extend", metavar="ID,...")
        case Kind.BIASES:
            return dict(type=_bias, action="append", metavar="ID=X")
        case Kind.CHOICE:
            return dict(choices=control.choices)
        case Kind.SWITCH:
            return dict(action="store_const", const=True)
        case Kind.TEXT:
            return dict(metavar="TEXT")
        case Kind.TEXTS:
            return dict(action="append", metavar="TEXT")
        case Kind.WHOLE_NUMBER:
            return dict(type=int, metavar=control.metavar or "N")


def _help(control: Control) -> str:
    return control.meaning if control.off is None else f"{control.meaning}; {control.off} is off"


def read_option_flags(arguments: argparse.Namespace) -> Options:
    """Return the options that the flags gave."""
    options: dict[str, Any] = {}
    for control in CONTROLS:
        value = getattr(arguments, control.name)
        options[control.name] = dict(value) if control.kind is Kind.BIASES and value is not None else value
    return Options(**options)


def is_about_option(message: str) -> bool:
    """Return whether a refusal is about an option, so that the server would refuse every text."""
    return _OPTION.match(message) is not None


def in_terms_of_flags(message: str) -> str:
    """Return the text of a refusal with the name of the flag instead of the name of the option."""
    return _OPTION.sub(lambda match: _flag(match[1]), message)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids, as in 5,17") from None


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=X, as in 17=-2.5") from None
