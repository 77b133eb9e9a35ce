"""`antiphon fill-mask`: tokens for the masked places of texts, from a running server's encoder."""

from __future__ import annotations

import argparse

from antiphon.cli.ask import Command, add_ask_arguments, run_command
from antiphon.cli.lines import positive
from antiphon.client import AsyncClient, FilledMasks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon fill-mask`."""
    add_ask_arguments(parser, "text that contains the model's mask token")
    parser.add_argument(
        "--top-k",
        type=positive,
        default=5,
        metavar="N",
        help="number of tokens to propose, most likely first (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Fill the texts, or the lines of standard input; return the exit code."""

    async def ask(client: AsyncClient, text: str) -> FilledMasks:
        return await client.fill_mask(text, top_k=arguments.top_k)

    return run_command(arguments, Command(name="fill-mask", ask=ask, word=_word))


def _word(answer: FilledMasks, text: str) -> str:
    places = ("\t".join(f"{one.text.strip()} {one.score:.4f}" for one in place.fillings) for place in answer.places)
    return "\t|\t".join(places)
