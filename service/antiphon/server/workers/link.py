"""Questions of a supervisor and answers of its worker, as lines of JSON over a pair of sockets.

The sockets have no name, so that no other process can reach a worker, and no port or file is left behind.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Self

from antiphon.domain.errors import AntiphonError, InvalidArgument, Status

log = logging.getLogger(__name__)

# A worker's metrics are the largest message: some hundred bytes for each of some thousand samples.
_MAX_LINE_BYTES = 1 << 27

Answer = Callable[[str, Any], Awaitable[Any]]
"""Answers a question: its name and its value, both of JSON."""


class LinkLost(Exception):
    """The other end has closed the link: its process has ended."""


class Refused(AntiphonError):
    """Error of a worker, with the status and the reason that it had there."""

    def __init__(self, message: str, status: str, reason: str) -> None:
        super().__init__(message)
        self.status = Status[status]
        self.reason = reason


class RefusedField(InvalidArgument):
    """A worker's InvalidArgument."""

    def __init__(self, message: str, field: str) -> None:
        AntiphonError.__init__(self, message)
        self.field = field


class Link:
    """One end of a link. For one event loop. answer: answers the other end's questions; None expects none."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: Answer | None) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._ids = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._is_lost = False

    @classmethod
    async def over(cls, end: socket.socket, answer: Answer | None = None) -> Self:
        """Return the link over one socket of a pair."""
        reader, writer = await asyncio.open_connection(sock=end, limit=_MAX_LINE_BYTES)
        return cls(reader, writer, answer)

    async def ask(self, question: str, value: Any = None) -> Any:
        """Return the other end's answer. Raises LinkLost, or the error that the other end answered with."""
        if self._is_lost:
            raise LinkLost
        number = next(self._ids)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, "ask": question, "value": value})
            return await future
        finally:
            del self._asked[number]

    async def run(self) -> None:
        """Read until the other end closes the link."""
        try:
            while line := await self._reader.readline():
                self._take(json.loads(line))
        except ConnectionError:
            pass
        finally:
            self._is_lost = True
            self._writer.close()
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(LinkLost())

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def _take(self, message: dict[str, Any]) -> None:
        if "ask" in message:
            task = asyncio.create_task(self._reply(message))
            self._answering.add(task)  # the event loop holds only weak references to tasks
            task.add_done_callback(self._answering.discard)
            return
        future = self._asked.get(message["id"])
        if future is None or future.done():
            return  # nobody waits for this answer any more
        if "error" in message:
            future.set_exception(_error_of(message["error"]))
        else:
            future.set_result(message["answer"])

    async def _reply(self, message: dict[str, Any]) -> None:
        assert self._answer is not None
        reply: dict[str, Any] = {"id": message["id"]}
        try:
            reply["answer"] = await self._answer(message["ask"], message["value"])
        except AntiphonError as error:
            reply["error"] = {"message": str(error), "status": error.status.name, "reason": error.reason}
            if isinstance(error, InvalidArgument):
                reply["error"]["field"] = error.field
        except Exception:
            log.exception("the question %s has no answer", message["ask"])
            reply["error"] = {"message": "a worker failed", "status": "INTERNAL", "reason": "INTERNAL"}
        self._send(reply)


def _error_of(error: dict[str, str]) -> AntiphonError:
    if "field" in error:
        return RefusedField(error["message"], error["field"])
    return Refused(error["message"], error["status"], error["reason"])
