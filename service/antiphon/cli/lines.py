"""Lines of standard input, for commands that answer each of them in order."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from antiphon.cli.progress import Progress, remaining_bytes
from antiphon.client.many_tasks import ordered_map

EXIT_SOME_FAILED = 1
EXIT_USER_ERROR = 2
STDIN = 0
_BLOCK_BYTES = 1 << 16

# All characters that a program may interpret as the end of a line.
_LINE_ENDS = dict.fromkeys(map(ord, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of standard input, without its newline; number counts from 1."""

    number: int
    raw: bytes


class Stopped(Exception):
    """No further line can succeed; the message contains the reason."""


class Answered(Protocol):
    """Result of a line, as all commands have it."""

    @property
    def line(self) -> Line:
        """Return the line."""

    @property
    def problem(self) -> str | None:
        """Return the error of the line, or None."""


A = TypeVar("A", bound=Answered)


class Answers(Generic[A]):
    """Writes the answers of a command's lines in order, and shows progress. A context: it ends the display.

    write: writes one answer to standard output, which is flushed once a batch of answers is written.
    """

    def __init__(self, command: str, write: Callable[[A], None]) -> None:
        self._command = command
        self._write = write
        self._progress = Progress(sys.stderr, total_bytes=remaining_bytes(STDIN))
        self._num_failed = 0
        self._is_flush_due = False
        self._broken: OSError | None = None  # error of standard output
        self._task: asyncio.Task[Any] | None = None

    @property
    def exit_code(self) -> int:
        """Exit code of the command once all lines are answered."""
        return EXIT_SOME_FAILED if self._num_failed else 0

    def add(self, answered: A) -> None:
        """Write the next answer; its error goes to standard error with the line number."""
        if sys.stdout.isatty() or answered.problem is not None:
            self._progress.clear()
        if answered.problem is not None:
            self._num_failed += 1
            print(f"antiphon {self._command}: line {answered.line.number}: {answered.problem}", file=sys.stderr)
        self._write(answered)
        self._progress.advance(len(answered.line.raw) + 1)
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        try:
            sys.stdout.flush()
        except OSError as error:  # this is a callback of the event loop: the command must end with the error
            self._broken = error
            if self._task is not None:
                self._task.cancel()

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._task = None
        self._progress.finish()
        if self._broken is not None:
            raise self._broken
        sys.stdout.flush()


async def answer_lines(
    command: str, answer: Callable[[Line], Awaitable[A]], write: Callable[[A], None], *, concurrency: int
) -> int:
    """Answer the lines of standard input, `concurrency` at a time, and write the answers in order.

    Returns the exit code. Errors of lines are printed to standard error with the line number. Raises the exceptions
    of `answer`.
    """
    with Answers(command, write) as answers:
        async for answered in ordered_map(lines_of(STDIN), answer, concurrency=concurrency):
            answers.add(answered)
    return answers.exit_code


async def lines_of(descriptor: int) -> AsyncIterator[Line]:
    """Yield the lines of a file descriptor. A thread reads at most one block ahead.

    It is a daemon thread, because a read from a terminal cannot be interrupted and must not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    wanted = threading.Semaphore(0)
    arrived: asyncio.Queue[list[bytes] | OSError | None] = asyncio.Queue()

    def send_to_loop(item: list[bytes] | OSError | None) -> None:
        wanted.acquire()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the lines are not read any more
            loop.call_soon_threadsafe(arrived.put_nowait, item)

    def read() -> None:
        try:
            for lines in _blocks_of_lines(descriptor):
                send_to_loop(lines)
        except OSError as error:
            send_to_loop(error)
        else:
            send_to_loop(None)

    threading.Thread(target=read, name="stdin", daemon=True).start()
    number = 0
    while True:
        wanted.release()
        lines = await arrived.get()
        if lines is None:
            return
        if isinstance(lines, OSError):
            raise Stopped(f"standard input cannot be read: {lines.strerror}")
        for raw in lines:
            number += 1
            yield Line(number=number, raw=raw.removesuffix(b"\r"))


def _blocks_of_lines(descriptor: int) -> Iterator[list[bytes]]:
    """Yield the lines that arrive together, without their newlines."""
    begun: list[bytes] = []  # parts of a line whose end has not arrived
    while block := os.read(descriptor, _BLOCK_BYTES):
        first, *others = block.split(b"\n")
        begun.append(first)
        if others:
            yield [b"".join(begun), *others[:-1]]
            begun = [others[-1]]
    if any(begun):
        yield [b"".join(begun)]


def one_line(text: str) -> str:
    """Return the text with a space in place of every line end."""
    return text.translate(_LINE_ENDS)


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    return _at_least(1, int(text))


def natural(text: str) -> int:
    """Read a whole number of at least 0."""
    return _at_least(0, int(text))


def _at_least(least: int, value: int) -> int:
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is not at least {least}")
    return value
