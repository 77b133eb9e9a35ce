"""`antiphon tag`: labelled spans of texts, such as names, from a running server's encoder."""

from __future__ import annotations

import argparse

from antiphon.cli.ask import Command, add_ask_arguments, run_command
from antiphon.client import AsyncClient, Tagging


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon tag`."""
    add_ask_arguments(parser, "text to label")


def run(arguments: argparse.Namespace) -> int:
    """Label the texts, or the lines of standard input; return the exit code."""

    async def ask(client: AsyncClient, text: str) -> Tagging:
        return await client.tag(text)

    return run_command(arguments, Command(name="tag", ask=ask, word=_word))


def _word(answer: Tagging, text: str) -> str:
    return "\t".join(f"{span.label}: {text[span.start : span.end]}" for span in answer.spans)
