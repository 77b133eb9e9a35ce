"""Lines of standard input for commands that answer each of them in order, and what ends such a command."""

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

# Whatever a reader of lines may take for the end of one.
_LINE_ENDS = dict.fromkeys(map(ord, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of standard input, without its newline; number counts from 1."""

    number: int
    raw: bytes


class Stopped(Exception):
    """No further line can succeed; the message says why."""


class Answered(Protocol):
    """What a line came to, as far as all commands have it."""

    @property
    def line(self) -> Line:
        """Which line."""

    @property
    def problem(self) -> str | None:
        """What went wrong with it; None where nothing did."""


A = TypeVar("A", bound=Answered)


async def answer_lines(
    command: str, answer: Callable[[Line], Awaitable[A]], write: Callable[[A], None], *, concurrency: int
) -> int:
    """Answer the lines of standard input, so many at once, and write the answers in order; returns the exit code.

    A line's problem goes to standard error, named by its number. Raises what `answer` does.
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
    """Lines of a file descriptor, read by a thread no further ahead than one line.

    A daemon thread, because a read from a terminal cannot be interrupted and must not keep the process alive.
    """
    loop = asyncio.get_running_loop()
    wanted = threading.Semaphore(0)
    arrived: asyncio.Queue[bytes | OSError | None] = asyncio.Queue()

    def hand_over(item: bytes | OSError | None) -> None:
        wanted.acquire()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads on
            loop.call_soon_threadsafe(arrived.put_nowait, item)

    def read() -> None:
        try:
            with os.fdopen(descriptor, "rb", closefd=False) as stream:
                for raw in stream:
                    hand_over(raw)
        except OSError as error:
            hand_over(error)
        else:
            hand_over(None)

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
    """The text with a space for every end of a line."""
    return text.translate(_LINE_ENDS)


def positive(text: str) -> int:
    """The value of a flag that counts something."""
    return _at_least(1, int(text))


def natural(text: str) -> int:
    """As positive, where 0 means something as well."""
    return _at_least(0, int(text))


def _at_least(least: int, value: int) -> int:
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is below {least}")
    return value
