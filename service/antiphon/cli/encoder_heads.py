"""`antiphon classify`, `tag` and `fill-mask`: outputs of a running server's encoder, one line of output for each text.

A client; loads no model. Each command defines its flags, its call to the server and the format of an answer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from antiphon.cli.common import CommandError, natural, positive
from antiphon.cli.connection_flags import (
    add_call_flags,
    add_connection_flags,
    add_model_flags,
    connection_problem,
    read_client_flags,
    server_problem,
)
from antiphon.cli.lines import Line, answer_lines, check_before_lines, one_line, run_command, text_of
from antiphon.client import AsyncClient, Classification, FilledMasks, ServerError, Tagging

# Statuses with which every other line would fail too.
_HOPELESS = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """Result of a line: the printed text and the error."""

    line: Line
    printed: str = ""
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadCommand:
    """Command that prints one line of output for each text, in the order of the texts."""

    name: str
    text_help: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    """Adds the flags that the command has besides those of all these commands."""
    request: Callable[[AsyncClient, argparse.Namespace, str], Awaitable[Any]]
    """Sends a text, and returns the answer."""
    format_answer: Callable[[Any, str], str]
    """Formats an answer and its text."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags of the command."""
        parser.add_argument(
            "text", nargs="*", metavar="TEXT", help=f"{self.text_help} (default: lines of standard input)"
        )
        add_model_flags(parser)
        parser.add_argument("--json", action="store_true", help="print each answer as one JSON object with all fields")
        parser.add_argument(
            "--concurrency", type=positive, default=64, metavar="N", help="concurrent lines (default: %(default)s)"
        )
        add_call_flags(parser)
        add_connection_flags(parser)
        self.add_flags(parser)

    def run(self, arguments: argparse.Namespace) -> int:
        """Answer the texts, or standard input if there are none; return the exit code."""
        return run_command(self.name, self._run(arguments))

    async def _run(self, arguments: argparse.Namespace) -> int:
        try:
            client = AsyncClient(arguments.target, model=arguments.model, **read_client_flags(arguments))
        except ValueError as error:
            raise CommandError(connection_problem(error)) from None
        async with client:
            if not arguments.text:
                return await self._answer_lines(client, arguments)
            for text in arguments.text:
                try:
                    print(await self._printed(client, arguments, text))
                except ServerError as error:
                    raise CommandError(server_problem(error, arguments.target)) from None
                except ValueError as error:
                    raise CommandError(f"{text!r} cannot be sent: {error}") from None
            return 0

    async def _answer_lines(self, client: AsyncClient, arguments: argparse.Namespace) -> int:
        try:
            await check_before_lines(client)
        except ServerError as error:
            raise CommandError(server_problem(error, arguments.target)) from None

        async def answer(line: Line) -> _Answer:
            return await self._answer(client, arguments, line)

        def write(answer: _Answer) -> None:
            print(answer.printed, flush=True)

        return await answer_lines(self.name, answer, write, concurrency=arguments.concurrency)

    async def _answer(self, client: AsyncClient, arguments: argparse.Namespace, line: Line) -> _Answer:
        empty = "null" if arguments.json else ""
        text, problem = text_of(line)
        if problem is not None or not text.strip():
            return _Answer(line=line, printed=empty, problem=problem)
        try:
            return _Answer(line=line, printed=await self._printed(client, arguments, text))
        except ServerError as error:
            if error.code in _HOPELESS:
                raise CommandError(f"line {line.number}: {server_problem(error, arguments.target)}") from None
            return _Answer(line=line, printed=empty, problem=error.message)
        except ValueError as error:
            raise CommandError(str(error)) from None

    async def _printed(self, client: AsyncClient, arguments: argparse.Namespace, text: str) -> str:
        answer = await self.request(client, arguments, text)
        if arguments.json:
            return json.dumps(asdict(answer), ensure_ascii=False)
        return one_line(self.format_answer(answer, text))


def _add_classify_flags(parser: argparse.ArgumentParser) -> None:
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


async def _classify(client: AsyncClient, arguments: argparse.Namespace, text: str) -> Classification:
    first, tab, second = text.partition("\t")
    return await client.classify(
        first, pair=second if tab else None, top_k=arguments.top_k, next_sentence=arguments.next_sentence
    )


def _format_classification(answer: Classification, text: str) -> str:
    return "\t".join(f"{label.label} {label.score:.4f}" for label in answer.labels)


CLASSIFY = HeadCommand(
    name="classify",
    text_help="text to classify; a tab separates the two texts of a pair",
    add_flags=_add_classify_flags,
    request=_classify,
    format_answer=_format_classification,
)


async def _tag(client: AsyncClient, arguments: argparse.Namespace, text: str) -> Tagging:
    return await client.tag(text)


def _format_tagging(answer: Tagging, text: str) -> str:
    return "\t".join(f"{span.label}: {text[span.start : span.end]}" for span in answer.spans)


TAG = HeadCommand(
    name="tag",
    text_help="text to label",
    add_flags=lambda parser: None,
    request=_tag,
    format_answer=_format_tagging,
)


def _add_fill_mask_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--top-k",
        type=positive,
        default=5,
        metavar="N",
        help="number of tokens to propose, most likely first (default: %(default)s)",
    )


async def _fill_mask(client: AsyncClient, arguments: argparse.Namespace, text: str) -> FilledMasks:
    return await client.fill_mask(text, top_k=arguments.top_k)


def _format_filled_masks(answer: FilledMasks, text: str) -> str:
    places = (
        "\t".join(f"{token.text.strip()} {token.score:.4f}" for token in place.fillings) for place in answer.places
    )
    return "\t|\t".join(places)


FILL_MASK = HeadCommand(
    name="fill-mask",
    text_help="text that contains the model's mask token",
    add_flags=_add_fill_mask_flags,
    request=_fill_mask,
    format_answer=_format_filled_masks,
)
