"""`antiphon generate`: prints the server's answers to texts or lines, in order. A client; loads no model."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import grpc

from antiphon.cli.common import CommandError, positive
from antiphon.cli.connection_flags import (
    add_call_flags,
    add_connection_flags,
    add_model_flags,
    connection_problem,
    read_client_flags,
    server_problem,
)
from antiphon.cli.lines import STDIN, Answers, Line, check_before_lines, lines_of, one_line, run_command, text_of
from antiphon.client import AsyncClient, Generation, Options, ServerError
from antiphon.client.many import DEFAULT_CONCURRENCY
from antiphon.controls.control import Control, Kind
from antiphon.controls.table import CONTROLS

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
    add_model_flags(parser)
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
    return run_command("generate", _run(arguments, read_option_flags(arguments)))


async def _run(arguments: argparse.Namespace, options: Options) -> int:
    languages = {"source_language": arguments.source_language, "target_language": arguments.target_language}
    try:
        client = AsyncClient(arguments.target, model=arguments.model, **languages, **read_client_flags(arguments))
    except ValueError as error:
        raise CommandError(connection_problem(error)) from None
    async with client:
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
            raise CommandError(_explain(error, arguments.target)) from None
        except ValueError as error:
            raise CommandError(f"{text!r} cannot be sent: {in_terms_of_flags(str(error))}") from None
    return 0


async def _stream(client: AsyncClient, text: str, options: Options) -> None:
    async for delta in client.generate(text, options):
        sys.stdout.write(one_line(delta.text))
        sys.stdout.flush()
    sys.stdout.write("\n")


async def _translate_lines(client: AsyncClient, arguments: argparse.Namespace, options: Options) -> int:
    try:
        await check_before_lines(client)
    except ServerError as error:
        raise CommandError(_explain(error, arguments.target)) from None

    def write(answered: Answer) -> None:
        _print_lines(answered.outputs, options, is_json=arguments.json)

    with Answers("generate", write) as answers:
        try:
            await _Lines(client, arguments, options, answers).answer()
        except ValueError as error:
            raise CommandError(in_terms_of_flags(str(error))) from None
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
        """Answer every line. Raises CommandError if no further line can succeed, ValueError for a wrong option."""
        concurrency = self._arguments.concurrency
        async for outcome in self._client.generate_outputs_many(self._texts(), self._options, concurrency=concurrency):
            line = self._waiting.popleft()
            assert isinstance(line, Line)
            self._answers.add(self._answered(line, outcome))
            self._write_answers()

    async def _texts(self) -> AsyncIterator[str]:
        async for line in lines_of(STDIN):
            text, problem = text_of(line)
            is_sent = problem is None and text.strip()
            self._waiting.append(line if is_sent else Answer(line=line, problem=problem))
            if is_sent:
                yield text
            else:
                self._write_answers()

    def _write_answers(self) -> None:
        """Write the answers before the next one that the server gives."""
        while self._waiting and isinstance(answer := self._waiting[0], Answer):
            self._waiting.popleft()
            self._answers.add(answer)

    def _answered(self, line: Line, outcome: list[Generation] | ServerError) -> Answer:
        if not isinstance(outcome, ServerError):
            return Answer(line=line, outputs=tuple(outcome))
        if outcome.code in _HOPELESS or is_about_option(outcome.message):
            raise CommandError(f"line {line.number}: {_explain(outcome, self._arguments.target)}")
        return Answer(line=line, problem=outcome.message)


def _explain(error: ServerError, target: str) -> str:
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return server_problem(error, target)
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


# Beginning of a refusal of a flag's value; languages are fields of the request, not of its options.
_OPTION = re.compile(r"^(?:options\.)?((?<=options\.)\w+|(?:source|target)_language\b)")


def add_option_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all controls in the table. A flag that is absent has the value None."""
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
