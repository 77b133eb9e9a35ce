"""`antiphon classify`: labels of texts or pairs of texts, from a running server's encoder."""

from __future__ import annotations

import argparse

from antiphon.cli.ask import Command, add_ask_arguments, run_command
from antiphon.cli.lines import natural
from antiphon.client import AsyncClient, Classification


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon classify`."""
    add_ask_arguments(parser, "text to classify; a tab separates the two texts of a pair")
    parser.add_argument(
        "--top-k",
        type=natural,
        default=1,
        metavar="N",
        help="number of labels to print, best first; 0: all (default: %(default)s)",
    )
    parser.add_argument(
        "--next-sentence", action="store_true", help="predict if the second text of a pair follows the first"
    )


def run(arguments: argparse.Namespace) -> int:
    """Classify the texts, or the lines of standard input; return the exit code."""

    async def ask(client: AsyncClient, text: str) -> Classification:
        first, tab, second = text.partition("\t")
        return await client.classify(
            first, pair=second if tab else None, top_k=arguments.top_k, next_sentence=arguments.next_sentence
        )

    return run_command(arguments, Command(name="classify", ask=ask, word=_word))


def _word(answer: Classification, text: str) -> str:
    return "\t".join(f"{one.label} {one.score:.4f}" for one in answer.labels)
