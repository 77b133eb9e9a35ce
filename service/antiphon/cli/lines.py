"""Answers to lines of standard input, in order: reading, writing, progress on a terminal, interrupts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TextIO, TypeVar

from antiphon.cli.common import EXIT_SOME_FAILED, CommandError, report_error, write_utf8
from antiphon.client import AsyncClient
from antiphon.client.many_tasks import ordered_map

T = TypeVar("T")

STDIN = 0
_BLOCK_BYTES = 1 << 16
# People cannot read faster updates.
_INTERVAL_S = 0.1

# All characters that a program may interpret as the end of a line.
_LINE_ENDS = dict.fromkeys(map(ord, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), " ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of standard input, without its newline; number counts from 1."""

    number: int
    raw: bytes


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
        self._progress = _Progress(sys.stderr, total_bytes=_remaining_bytes(STDIN))
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
    demand = threading.Semaphore(0)
    arrived: asyncio.Queue[list[bytes] | OSError | None] = asyncio.Queue()

    def send_to_loop(item: list[bytes] | OSError | None) -> None:
        demand.acquire()
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
        demand.release()
        lines = await arrived.get()
        if lines is None:
            return
        if isinstance(lines, OSError):
            raise CommandError(f"standard input cannot be read: {lines.strerror}")
        for raw in lines:
            number += 1
            yield Line(number=number, raw=raw.removesuffix(b"\r"))


def _blocks_of_lines(descriptor: int) -> Iterator[list[bytes]]:
    """Yield the lines that arrive together, without their newlines."""
    parts: list[bytes] = []  # of a line whose end has not arrived
    while block := os.read(descriptor, _BLOCK_BYTES):
        *ends, begin = block.split(b"\n")
        if ends:
            yield [b"".join([*parts, ends[0]]), *ends[1:]]
            parts = []
        parts.append(begin)
    if any(parts):
        yield [b"".join(parts)]


def text_of(line: Line) -> tuple[str, str | None]:
    """Return the text of a line, and why it has none."""
    try:
        return line.raw.decode("utf-8"), None
    except UnicodeDecodeError as error:
        return "", f"not UTF-8: byte 0x{line.raw[error.start]:02x} at offset {error.start}"


def one_line(text: str) -> str:
    """Return the text with a space in place of every line end."""
    return text.translate(_LINE_ENDS)


class _Progress:
    """Counts processed lines and bytes, and draws them on `stream` if it is a terminal.

    total_bytes: size of the input; None if it is unknown, and then only a count is drawn.
    """

    def __init__(self, stream: TextIO, *, total_bytes: int | None) -> None:
        self._stream = stream
        self._is_shown = stream.isatty()
        self._total_bytes = total_bytes
        self._start_s = time.monotonic()
        self._drawn_s = 0.0
        self._is_drawn = False
        self._num_lines = 0
        self._num_bytes = 0

    def advance(self, num_bytes: int) -> None:
        """Count one more line of num_bytes bytes."""
        self._num_lines += 1
        self._num_bytes += num_bytes
        now_s = time.monotonic()
        if self._is_shown and now_s - self._drawn_s >= _INTERVAL_S:
            self._drawn_s = now_s
            self._draw(now_s)

    def clear(self) -> None:
        """Clear the terminal's line for another message."""
        if self._is_drawn:
            self._is_drawn = False
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def finish(self) -> None:
        """Draw the last state and end the line."""
        if self._is_shown and self._num_lines:
            self._draw(time.monotonic())
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self, now_s: float) -> None:
        rate = self._num_lines / max(now_s - self._start_s, 1e-9)
        text = f"{self._num_lines} lines, {rate:.0f}/s"
        if self._total_bytes:
            done = min(1.0, self._num_bytes / self._total_bytes)
            width = max(10, shutil.get_terminal_size().columns - len(text) - 10)
            bar = "#" * round(width * done)
            text = f"{done:4.0%} [{bar:<{width}}] {text}"
        self._is_drawn = True
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()


def _remaining_bytes(descriptor: int) -> int | None:
    """Return the unread bytes of a regular file; None for a pipe or a terminal."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_size - os.lseek(descriptor, 0, os.SEEK_CUR)


def run_command(command: str, work: Coroutine[Any, Any, int]) -> int:
    """Run a command that answers texts, and return its exit code."""
    write_utf8()  # same encoding as the input
    try:
        return run_interruptible(work)
    except CommandError as error:
        return report_error(command, error)


async def check_before_lines(client: AsyncClient) -> None:
    """Check standard input, target and model before the first line is read. Raises CommandError, ServerError."""
    if sys.stdin is None:
        raise CommandError("standard input is closed, and no TEXT is given")
    await client.get_model()


def run_interruptible(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as asyncio.run does. Raises KeyboardInterrupt after SIGINT.

    The handler of asyncio.run runs when the interpreter next checks for signals. If a signal arrives between the last
    check and the moment when the loop blocks, nothing may wake the loop. A handler of the event loop is called through
    a pipe that wakes it. A second interrupt does not wait for the cleanup of the work.
    """
    interrupted = False

    async def run() -> T:
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            nonlocal interrupted
            if interrupted:
                raise KeyboardInterrupt
            interrupted = True
            task.cancel()

        with contextlib.suppress(RuntimeError):  # no handlers outside the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
        return await work

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise
