"""Common part of `antiphon classify`, `tag` and `fill-mask`: prints one line for each text or line, in order.

A client; loads no model. Each command defines its call to the server and the format of an answer.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from antiphon.cli.connection_flags import add_call_flags, add_connection_flags, connection_problem, read_terms
from antiphon.cli.interrupt import run_interruptible
from antiphon.cli.lines import (
    EXIT_USER_ERROR,
    Line,
    Stopped,
    answer_lines,
    one_line,
    positive,
)
from antiphon.client import DEFAULT_TARGET, AsyncClient, ServerError

# Statuses with which every other line would fail too.
_HOPELESS = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command: its name, the call that answers a text, and the function that formats an answer and its text."""

    name: str
    ask: Callable[[AsyncClient, str], Awaitable[Any]]
    word: Callable[[Any, str], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """Result of a line: the printed text and the error."""

    line: Line
    printed: str = ""
    problem: str | None = None


def add_ask_arguments(parser: argparse.ArgumentParser, text_help: str) -> None:
    """Add the flags that these commands share."""
    parser.add_argument("text", nargs="*", metavar="TEXT", help=f"{text_help} (default: lines of standard input)")
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="server (default: %(default)s)")
    parser.add_argument("--model", default="", metavar="NAME", help="model that answers (default: the server's first)")
    parser.add_argument("--json", action="store_true", help="print each answer as one JSON object with all fields")
    parser.add_argument(
        "--concurrency", type=positive, default=64, metavar="N", help="concurrent lines (default: %(default)s)"
    )
    add_call_flags(parser)
    add_connection_flags(parser)


def run_command(arguments: argparse.Namespace, command: Command) -> int:
    """Answer the texts, or standard input if there are none; return the exit code."""
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(encoding="utf-8")  # same encoding as the input; the locale does not matter
    try:
        return run_interruptible(_run(arguments, command))
    except Stopped as stopped:
        print(f"antiphon {command.name}: {stopped}", file=sys.stderr)
        return EXIT_USER_ERROR


async def _run(arguments: argparse.Namespace, command: Command) -> int:
    try:
        asking = AsyncClient(arguments.target, model=arguments.model, **read_terms(arguments))
    except ValueError as error:
        raise Stopped(connection_problem(error)) from None
    async with asking as client:
        if not arguments.text:
            return await _answer_lines(client, arguments, command)
        for text in arguments.text:
            try:
                print(await _printed(client, arguments, command, text))
            except ServerError as error:
                raise Stopped(_explain(error, arguments.target)) from None
            except ValueError as error:
                raise Stopped(f"{text!r} cannot be sent: {error}") from None
        return 0


async def _answer_lines(client: AsyncClient, arguments: argparse.Namespace, command: Command) -> int:
    if sys.stdin is None:
        raise Stopped("standard input is closed, and no TEXT is given")
    try:
        await client.get_model()  # reports a wrong target or model before the first line is read
    except ServerError as error:
        raise Stopped(_explain(error, arguments.target)) from None

    async def answer(line: Line) -> _Answer:
        return await _answer(client, arguments, command, line)

    def write(answered: _Answer) -> None:
        print(answered.printed, flush=True)

    return await answer_lines(command.name, answer, write, concurrency=arguments.concurrency)


async def _answer(client: AsyncClient, arguments: argparse.Namespace, command: Command, line: Line) -> _Answer:
    nothing = "null" if arguments.json else ""
    try:
        text = line.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"not UTF-8: byte 0x{line.raw[error.start]:02x} at offset {error.start}"
        return _Answer(line=line, printed=nothing, problem=problem)
    if not text.strip():
        return _Answer(line=line, printed=nothing)
    try:
        return _Answer(line=line, printed=await _printed(client, arguments, command, text))
    except ServerError as error:
        if error.code in _HOPELESS:
            raise Stopped(f"line {line.number}: {_explain(error, arguments.target)}") from None
        return _Answer(line=line, printed=nothing, problem=error.message)
    except ValueError as error:
        raise Stopped(str(error)) from None


async def _printed(client: AsyncClient, arguments: argparse.Namespace, command: Command, text: str) -> str:
    answer = await command.ask(client, text)
    if arguments.json:
        return json.dumps(asdict(answer), ensure_ascii=False)
    return one_line(command.word(answer, text))


def _explain(error: ServerError, target: str) -> str:
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return f"{target} is unavailable ({error.message}); is a server running there? start one with: antiphon serve"
    return error.message
