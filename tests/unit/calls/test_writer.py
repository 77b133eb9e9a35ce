"""Time limit of messages that wait for their clients: one timer serves all writes, with the same limit for each."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from antiphon.domain.errors import SlowReader
from antiphon.observability.call import CallRecord
from antiphon.rpc.client_waits import ClientWaits, Writer
from tests.waits import client_waits


class Reader:
    """Call whose client reads a message on request."""

    def __init__(self) -> None:
        self._has_room = asyncio.Event()
        self.is_written_to = asyncio.Event()

    def take(self) -> None:
        self._has_room.set()

    async def send_initial_metadata(self, metadata: Any) -> None:
        """Headers need no room."""

    async def write(self, message: Any) -> None:
        self.is_written_to.set()
        await self._has_room.wait()


class Clock:
    """Clock that a test advances. The timer of the time limit reads it."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._is_read = asyncio.Event()

    def __call__(self) -> float:
        self._is_read.set()
        return self.now_s

    async def next_reading(self) -> None:
        self._is_read.clear()
        await self._is_read.wait()


class Gone:
    """Call that has ended."""

    async def send_initial_metadata(self, metadata: Any) -> None:
        raise grpc.aio.InternalError

    async def write(self, message: Any) -> None:
        raise AssertionError("written after the call has ended")


def writer_of(client: Any, waits: ClientWaits) -> Writer:
    record = CallRecord(method="m", request_id="r", arrival_s=0.0)
    return Writer(waits, record, client.write, lambda: client.send_initial_metadata(()))


async def test_writer_ends_each_write_whose_client_reads_nothing() -> None:
    """The first write sets the timer; it serves later writes too."""
    waits = client_waits(answer_timeout_s=0.05)
    order: list[int] = []

    async def write(index: int, reader: Any) -> None:
        with pytest.raises(SlowReader):
            await writer_of(reader, waits).write(b"")
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        order.append(index)

    readers = [Reader() for _ in range(3)]
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for index, reader in enumerate(readers):
            group.create_task(write(index, reader))
            await reader.is_written_to.wait()
    assert order == [0, 1, 2]


async def test_writer_limits_the_time_of_each_message_and_not_of_the_stream() -> None:
    """Each message waits for less than the limit, and the stream for more. The test advances the clock."""
    clock = Clock()
    waits = client_waits(answer_timeout_s=0.05, clock=clock)
    for _ in range(4):
        reader = Reader()
        writing = asyncio.ensure_future(writer_of(reader, waits).write(b""))
        await reader.is_written_to.wait()
        clock.now_s += 0.03
        async with asyncio.timeout(60):
            await clock.next_reading()  # by the timer, while the message waits
        reader.take()
        await writing


async def test_writer_reports_no_slow_reader_when_the_call_is_cancelled() -> None:
    """A call that ended otherwise is not reported as a slow reader if its time passes during its cleanup."""
    waits = client_waits(answer_timeout_s=0.05)
    reader = Reader()
    writing = asyncio.ensure_future(writer_of(reader, waits).write(b""))
    await reader.is_written_to.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    with pytest.raises(SlowReader):  # the timer was set for the first one, and serves the second
        await writer_of(reader, waits).write(b"")


async def test_writer_cancels_a_write_when_its_call_has_ended() -> None:
    with pytest.raises(asyncio.CancelledError):
        await writer_of(Gone(), client_waits()).write(b"")


async def test_cancellation_waits_until_a_message_that_is_written_to_the_end_is_sent() -> None:
    """A call of many requests that ends with an error can send its status only after the headers."""
    reader = Reader()
    record = CallRecord(method="m", request_id="r", arrival_s=0.0)
    writer = Writer(client_waits(), record, reader.write, lambda: reader.send_initial_metadata(()))
    writing = asyncio.ensure_future(writer.write_to_the_end(b""))
    await reader.is_written_to.wait()
    writing.cancel()
    await asyncio.wait({writing}, timeout=0)
    assert (writing.done(), record.num_messages) == (False, 0)
    reader.take()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert record.num_messages == 1
