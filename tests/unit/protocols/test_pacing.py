"""Time limit of messages that wait for their clients: one timer serves all writes, with the same limit for each."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest
from google.protobuf.empty_pb2 import Empty

from antiphon.service.domain.errors import SlowReader
from antiphon.service.rpc.v1.answers.pacing import Pacing
from tests.waits import client_waits


class Reader:
    """Context of a call whose client reads a message on request."""

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


class Gone:
    """Context of a call that has ended."""

    async def send_initial_metadata(self, metadata: Any) -> None:
        raise grpc.aio.InternalError


async def test_pacing_gives_up_each_write_whose_reader_takes_nothing() -> None:
    """The first write sets the timer; it serves later writes too."""
    pacing = Pacing(1.0, client_waits(answer_timeout_s=0.05))
    order: list[int] = []

    async def write(index: int, reader: Any) -> None:
        with pytest.raises(SlowReader):
            await pacing.writer(reader).write(Empty())
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]
        order.append(index)

    readers = [Reader() for _ in range(3)]
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for index, reader in enumerate(readers):
            group.create_task(write(index, reader))
            await reader.is_written_to.wait()
            await asyncio.sleep(0.01)  # so that their times come one after the other
    assert order == [0, 1, 2]


async def test_pacing_counts_the_time_of_one_message_and_not_of_all() -> None:
    """The stream lasts several times as long as one message may wait."""
    pacing = Pacing(1.0, client_waits(answer_timeout_s=0.05))
    loop = asyncio.get_running_loop()
    until_s = loop.time() + 0.2
    while loop.time() < until_s:
        reader = Reader()
        loop.call_later(0.005, reader.take)
        await pacing.writer(reader).write(Empty())  # type: ignore[arg-type]


async def test_pacing_lets_a_call_that_ends_be_cancelled() -> None:
    """A call that ended otherwise is not reported as a slow reader if its time passes during its cleanup."""
    pacing = Pacing(1.0, client_waits(answer_timeout_s=0.05))
    reader = Reader()
    writing = asyncio.ensure_future(pacing.writer(reader).write(Empty()))  # type: ignore[arg-type]
    await reader.is_written_to.wait()
    writing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writing
    with pytest.raises(SlowReader):  # the timer was set for the first one, and serves the second
        await pacing.writer(reader).write(Empty())  # type: ignore[arg-type]


async def test_pacing_ends_a_write_to_a_call_that_is_gone() -> None:
    with pytest.raises(asyncio.CancelledError):
        await Pacing(1.0, client_waits()).writer(Gone()).write(Empty())  # type: ignore[arg-type]
