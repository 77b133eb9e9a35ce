"""Link of a supervisor and a worker: calls as lines of JSON over a pair of sockets, and the settings of a new worker.

The sockets have no name, so that no other process can reach a worker, and no port or file is left behind.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Self

from antiphon.domain.errors import AntiphonError, InvalidArgument, Status
from antiphon.server.settings import ServerConfig
from antiphon.server.workers.division import Role

log = logging.getLogger(__name__)

# A worker's metrics are the largest message: some hundred bytes for each of some thousand samples.
_MAX_LINE_BYTES = 1 << 27

Handler = Callable[[str, Any], Awaitable[Any]]
"""Returns the result of a method, from its name and argument: values of JSON."""


class LinkLost(Exception):
    """The other end has closed the link: its process has ended."""


class WorkerError(AntiphonError):
    """Error of a worker, with its status and its reason there."""

    def __init__(self, message: str, status: str, reason: str) -> None:
        super().__init__(message)
        self.status = Status[status]
        self.reason = reason


class WorkerInvalidArgument(InvalidArgument):
    """A worker's InvalidArgument."""

    def __init__(self, message: str, field: str) -> None:
        AntiphonError.__init__(self, message)
        self.field = field


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """Settings of a new worker beside the server's, as its supervisor passes them."""

    index: int
    """Number of this worker, from 0."""
    num_workers: int
    """Number of the server's workers."""
    role: Role = Role.BOTH
    cores: tuple[int, ...]
    """Numbers of its cores; empty if it is not bound to any."""
    opens_early: bool
    """Opens its port before its models are loaded, so that early clients receive a status that lets them retry.

    The port of a worker that replaces another opens when it can serve, because other workers can.
    """

    @property
    def label(self) -> str:
        """Index and number of the workers that share the port, as clients receive them."""
        if self.role is Role.FRONT:  # the engine is the first worker, and clients never see it
            return f"{self.index - 1}/{self.num_workers - 1}"
        return f"{self.index}/{self.num_workers}"

    @property
    def num_answering(self) -> int:
        """Number of workers that answer calls, and share the port."""
        return self.num_workers if self.role is Role.BOTH else self.num_workers - 1

    def to_json(self, config: ServerConfig) -> bytes:
        """Return this and the settings of the server as JSON."""
        return json.dumps({"worker": asdict(self), "config": config.model_dump(mode="json")}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> tuple[Self, ServerConfig]:
        """Return both from JSON."""
        message = json.loads(text)
        worker = message["worker"]
        worker |= {"cores": tuple(worker["cores"]), "role": Role(worker["role"])}
        return cls(**worker), ServerConfig(**message["config"])


class Link:
    """One end of a link. For one event loop. handler: handles the other end's calls; None expects none."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler | None) -> None:
        self._reader = reader
        self._writer = writer
        self._handler = handler
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._replying: set[asyncio.Task[None]] = set()
        self._is_lost = False

    @classmethod
    async def over(cls, end: socket.socket, handler: Handler | None = None) -> Self:
        """Return the link over one socket of a pair."""
        reader, writer = await asyncio.open_connection(sock=end, limit=_MAX_LINE_BYTES)
        return cls(reader, writer, handler)

    async def call(self, method: str, argument: Any = None) -> Any:
        """Return the result of a method of the other end. Raises LinkLost, or the error of the method."""
        if self._is_lost:
            raise LinkLost
        number = next(self._ids)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number, "method": method, "argument": argument})
            return await future
        finally:
            del self._calls[number]

    async def run(self) -> None:
        """Read until the other end closes the link."""
        try:
            while line := await self._reader.readline():
                self._receive(json.loads(line))
        except ConnectionError:
            pass
        finally:
            self._is_lost = True
            self._writer.close()
            for future in self._calls.values():
                if not future.done():
                    future.set_exception(LinkLost())

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")

    def _receive(self, message: dict[str, Any]) -> None:
        if "method" in message:
            task = asyncio.create_task(self._reply(message))
            self._replying.add(task)  # the event loop holds only weak references to tasks
            task.add_done_callback(self._replying.discard)
            return
        future = self._calls.get(message["id"])
        if future is None or future.done():
            return  # nobody waits for this answer any more
        if "error" in message:
            future.set_exception(_error_of(message["error"]))
        else:
            future.set_result(message["result"])

    async def _reply(self, message: dict[str, Any]) -> None:
        assert self._handler is not None
        reply: dict[str, Any] = {"id": message["id"]}
        try:
            reply["result"] = await self._handler(message["method"], message["argument"])
        except AntiphonError as error:
            reply["error"] = {"message": str(error), "status": error.status.name, "reason": error.reason}
            if isinstance(error, InvalidArgument):
                reply["error"]["field"] = error.field
        except Exception:
            log.exception("the question %s has no answer", message["method"])
            reply["error"] = {"message": "a worker failed", "status": "INTERNAL", "reason": "INTERNAL"}
        self._send(reply)


def _error_of(error: dict[str, str]) -> AntiphonError:
    if "field" in error:
        return WorkerInvalidArgument(error["message"], error["field"])
    return WorkerError(error["message"], error["status"], error["reason"])
