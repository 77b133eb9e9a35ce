"""Lines of standard input, for commands that answer each of them in order."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from antiphon.cli.progress import Progress, remaining_bytes
from antiphon.client.ordered import ordered_map

EXIT_SOME_FAILED = 1
EXIT_USER_ERROR = 2
STDIN = 0

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


async def answer_lines(
    command: str, answer: Callable[[Line], Awaitable[A]], write: Callable[[A], None], *, concurrency: int
) -> int:
    """Answer the lines of standard input, `concurrency` at a time, and write the answers in order.

    Returns the exit code. Errors of lines are printed to standard error with the line number. Raises the exceptions
    of `answer`.
    """
    progress = Progress(sys.stderr, total_bytes=remaining_bytes(STDIN))
    num_failed = 0
    try:
        async for answered in ordered_map(lines_of(STDIN), answer, concurrency=concurrency):
            if sys.stdout.isatty() or answered.problem is not None:
                progress.clear()
            if answered.problem is not None:
                num_failed += 1
                print(f"antiphon {command}: line {answered.line.number}: {answered.problem}", file=sys.stderr)
            write(answered)
            progress.advance(len(answered.line.raw) + 1)
    finally:
        progress.finish()
    return EXIT_SOME_FAILED if num_failed else 0


async def lines_of(descriptor: int) -> AsyncIterator[Line]:
    """Yield the lines of a file descriptor. A thread reads at most one line ahead.

    It is a daemon thread, because a read from a terminal cannot be interrupted and must not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    wanted = threading.Semaphore(0)
    arrived: asyncio.Queue[bytes | OSError | None] = asyncio.Queue()

    def send_to_loop(item: bytes | OSError | None) -> None:
        wanted.acquire()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the lines are not read any more
            loop.call_soon_threadsafe(arrived.put_nowait, item)

    def read() -> None:
        try:
            with os.fdopen(descriptor, "rb", closefd=False) as stream:
                for raw in stream:
                    send_to_loop(raw)
        except OSError as error:
            send_to_loop(error)
        else:
            send_to_loop(None)

    threading.Thread(target=read, name="stdin", daemon=True).start()
    number = 0
    while True:
        wanted.release()
        raw = await arrived.get()
        if raw is None:
            return
        if isinstance(raw, OSError):
            raise Stopped(f"standard input cannot be read: {raw.strerror}")
        number += 1
        yield Line(number=number, raw=raw.removesuffix(b"\n").removesuffix(b"\r"))


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
