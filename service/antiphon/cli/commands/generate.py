"""`antiphon generate`: prints the server's answers to texts or lines, in order. A client; loads no model."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass

import grpc

from antiphon.cli.connection_flags import add_call_flags, add_connection_flags, connection_problem, read_terms
from antiphon.cli.interrupt import run_interruptible
from antiphon.cli.lines import (
    EXIT_USER_ERROR,
    STDIN,
    Answers,
    Line,
    Stopped,
    lines_of,
    one_line,
    positive,
)
from antiphon.cli.option_flags import add_option_flags, in_terms_of_flags, is_about_option, read_option_flags
from antiphon.client import DEFAULT_TARGET, AsyncClient, Generation, Options, ServerError
from antiphon.client.many import DEFAULT_CONCURRENCY

# Statuses with which every other line would fail too.
_HOPELESS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Outputs of a line, best first, and its error. A blank line has neither."""

    line: Line
    outputs: tuple[Generation, ...] = ()
    problem: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon generate`."""
    parser.add_argument("text", nargs="*", metavar="TEXT", help="text to translate (default: lines of standard input)")
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="server (default: %(default)s)")
    parser.add_argument("--model", default="", metavar="NAME", help="model that answers (default: the server's first)")
    for side in ("source", "target"):
        parser.add_argument(
            f"--{side}-language",
            default="",
            metavar="CODE",
            help=f"language of the {side}, for models with several languages (default: the model's)",
        )
    parser.add_argument("--json", action="store_true", help="print each answer as one JSON object with all fields")
    parser.add_argument(
        "--concurrency",
        type=positive,
        default=DEFAULT_CONCURRENCY,
        metavar="N",
        help="concurrent lines (default: %(default)s)",
    )
    add_call_flags(parser)
    add_connection_flags(parser)
    add_option_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Translate the texts, or standard input if there are none; return the exit code."""
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(encoding="utf-8")  # same encoding as the input; the locale does not matter
    try:
        return run_interruptible(_run(arguments, read_option_flags(arguments)))
    except Stopped as stopped:
        print(f"antiphon generate: {stopped}", file=sys.stderr)
        return EXIT_USER_ERROR


async def _run(arguments: argparse.Namespace, options: Options) -> int:
    languages = {"source_language": arguments.source_language, "target_language": arguments.target_language}
    try:
        asking = AsyncClient(arguments.target, model=arguments.model, **languages, **read_terms(arguments))
    except ValueError as error:
        raise Stopped(connection_problem(error)) from None
    async with asking as client:
        if arguments.text:
            return await _translate_texts(client, arguments, options)
        return await _translate_lines(client, arguments, options)


async def _translate_texts(client: AsyncClient, arguments: argparse.Namespace, options: Options) -> int:
    is_streamed = _num_lines(options) == 1 and not arguments.json
    for text in arguments.text:
        try:
            if is_streamed:
                await _stream(client, text, options)
            else:
                outputs = await client.generate_outputs(text, options)
                _print_lines(outputs, options, is_json=arguments.json)
                sys.stdout.flush()
        except ServerError as error:
            raise Stopped(_explain(error, arguments.target)) from None
        except ValueError as error:
            raise Stopped(f"{text!r} cannot be sent: {in_terms_of_flags(str(error))}") from None
    return 0


async def _stream(client: AsyncClient, text: str, options: Options) -> None:
    async for delta in client.generate(text, options):
        sys.stdout.write(one_line(delta.text))
        sys.stdout.flush()
    sys.stdout.write("\n")


async def _translate_lines(client: AsyncClient, arguments: argparse.Namespace, options: Options) -> int:
    if sys.stdin is None:
        raise Stopped("standard input is closed, and no TEXT is given")
    try:
        await client.get_model()  # reports a wrong target or model before the first line is read
    except ServerError as error:
        raise Stopped(_explain(error, arguments.target)) from None

    def write(answered: Answer) -> None:
        _print_lines(answered.outputs, options, is_json=arguments.json)

    with Answers("generate", write) as answers:
        try:
            await _Lines(client, arguments, options, answers).answer()
        except ValueError as error:
            raise Stopped(in_terms_of_flags(str(error))) from None
    return answers.exit_code


class _Lines:
    """Lines of standard input: all share a call to the server, and blank ones are answered here."""

    def __init__(
        self, client: AsyncClient, arguments: argparse.Namespace, options: Options, answers: Answers[Answer]
    ) -> None:
        self._client = client
        self._arguments = arguments
        self._options = options
        self._answers = answers
        self._waiting: deque[Line | Answer] = deque()  # lines whose answers are not written, or those answers

    async def answer(self) -> None:
        """Answer every line. Raises Stopped if no further line can succeed, ValueError for a wrong option."""
        concurrency = self._arguments.concurrency
        async for outcome in self._client.generate_outputs_many(self._texts(), self._options, concurrency=concurrency):
            line = self._waiting.popleft()
            assert isinstance(line, Line)
            self._answers.add(self._answered(line, outcome))
            self._write_known()

    async def _texts(self) -> AsyncIterator[str]:
        async for line in lines_of(STDIN):
            text, problem = _text_of(line)
            is_asked = problem is None and text.strip()
            self._waiting.append(line if is_asked else Answer(line=line, problem=problem))
            if is_asked:
                yield text
            else:
                self._write_known()

    def _write_known(self) -> None:
        """Write the answers before the next one that the server gives."""
        while self._waiting and isinstance(known := self._waiting[0], Answer):
            self._waiting.popleft()
            self._answers.add(known)

    def _answered(self, line: Line, outcome: list[Generation] | ServerError) -> Answer:
        if not isinstance(outcome, ServerError):
            return Answer(line=line, outputs=tuple(outcome))
        if outcome.code in _HOPELESS or is_about_option(outcome.message):
            raise Stopped(f"line {line.number}: {_explain(outcome, self._arguments.target)}")
        return Answer(line=line, problem=outcome.message)


def _text_of(line: Line) -> tuple[str, str | None]:
    """Return the text of a line, and why it has none."""
    try:
        return line.raw.decode("utf-8"), None
    except UnicodeDecodeError as error:
        return "", f"not UTF-8: byte 0x{line.raw[error.start]:02x} at offset {error.start}"


def _explain(error: ServerError, target: str) -> str:
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return f"{target} is unavailable ({error.message}); is a server running there? start one with: antiphon serve"
    return in_terms_of_flags(error.message)


def _num_lines(options: Options) -> int:
    return options.num_return_sequences or 1


def _print_lines(outputs: Sequence[Generation], options: Options, *, is_json: bool) -> None:
    """Print one line for each requested sequence; a missing sequence is an empty line, or null in JSON."""
    for index in range(_num_lines(options)):
        output = outputs[index] if index < len(outputs) else None
        if is_json:
            print(json.dumps(output and asdict(output), ensure_ascii=False))
        else:
            print(one_line(output.text) if output else "")
