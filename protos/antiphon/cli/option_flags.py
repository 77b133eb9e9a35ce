"""A flag for every decoding control of `Options`, of the same name, and what the server says about one in its terms."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from typing import Any

from antiphon.client.options import Options

# What a refusal of a flag's value begins with; languages are fields of the request beside its options.
_OPTION = re.compile(r"^(?:options\.)?((?<=options\.)\w+|(?:source|target)_language\b)")

# Name, metavar, type and help of the controls that hold one number.
_NUMBERS: tuple[tuple[str, str, type[int] | type[float], str], ...] = (
    ("max_new_tokens", "N", int, "most tokens to produce for one text"),
    ("min_new_tokens", "N", int, "fewest tokens to produce before a text may end"),
    ("time_limit_millis", "MS", int, "return what there is after so long"),
    ("temperature", "T", float, "0 takes the likeliest token; above 0 samples"),
    ("top_k", "K", int, "sample from the K likeliest tokens; 0 keeps all"),
    ("top_p", "P", float, "sample from the likeliest tokens that reach P"),
    ("min_p", "P", float, "drop tokens less likely than P times the likeliest"),
    ("typical_p", "P", float, "sample from the locally typical tokens that reach P"),
    ("seed", "N", int, "the same seed samples the same text (default: random)"),
    ("num_return_sequences", "N", int, "samples, or best hypotheses; one a line, best first"),
    ("beam_width", "N", int, "hypotheses kept alive; 1 is no beam search"),
    ("length_penalty", "X", float, "a hypothesis scores its log-probability over its length to this power"),
    ("repetition_penalty", "X", float, "divides the logits of tokens that came already; 1 is off"),
    ("presence_penalty", "X", float, "taken from the logit of a token that came already"),
    ("frequency_penalty", "X", float, "taken from a token's logit as often as it came"),
    ("no_repeat_ngram_size", "N", int, "no N tokens in a row come twice; 0 is off"),
    ("forced_first_id", "ID", int, "first token to produce, as a language code"),
    ("num_logprobs", "K", int, "log-probabilities and K alternatives of each token, in what --json prints"),
)
_ID_LISTS = (
    ("prefix_ids", "first tokens of the translation, as ids"),
    ("suppressed_ids", "tokens never chosen"),
    ("allowed_ids", "the only tokens chosen, beside the end token"),
    ("stop_ids", "tokens that end a text"),
)


def add_option_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of Options; a flag that is not given leaves None."""
    group = parser.add_argument_group(
        "decoding controls", "ID,... may be repeated; docs/CONTROLS.md describes them all"
    )
    for name, metavar, kind, text in _NUMBERS:
        group.add_argument(_flag(name), type=kind, metavar=metavar, help=text)
    for name, text in _ID_LISTS:
        group.add_argument(_flag(name), type=_ids, action="extend", metavar="ID,...", help=text)
    group.add_argument(
        "--early-stopping", choices=("heuristic", "first", "never"), help="when a beam search ends (default: heuristic)"
    )
    group.add_argument(
        "--logit-bias", type=_bias, action="append", metavar="ID=X", help="add X to a token's logit; may be repeated"
    )
    group.add_argument("--prefix-text", metavar="TEXT", help="first words of the translation, given and not printed")
    group.add_argument(
        "--stop-strings", action="append", metavar="TEXT", help="text that ends a translation; may be repeated"
    )
    group.add_argument("--ignore-eos", action="store_const", const=True, help="never choose the end token")


def read_option_flags(arguments: argparse.Namespace) -> Options:
    """The options that the flags gave."""
    given: dict[str, Any] = {field.name: getattr(arguments, field.name) for field in fields(Options)}
    if given["logit_bias"] is not None:
        given["logit_bias"] = dict(given["logit_bias"])
    return Options(**given)


def is_about_option(message: str) -> bool:
    """Whether a refusal is about an option, and so would come again for every text."""
    return _OPTION.match(message) is not None


def in_terms_of_flags(message: str) -> str:
    """A refusal that names an option, with its flag named instead."""
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
