"""Process of one worker, as its supervisor sees it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from dataclasses import dataclass
from typing import Any, Self

from antiphon.service.server.settings import ServerConfig
from antiphon.service.server.workers.link import Link, LinkLost
from antiphon.service.server.workers.role import Role
from antiphon.v1 import inference_pb2 as pb

_MODULE = "antiphon.service.server.workers.worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """Model that a worker has loaded."""

    name: str
    precision: str
    description: pb.Model


class WorkerProcess:
    """One worker, from its start to its end. For the event loop.

    last_metrics: its last exposition, which remains when it dies.
    """

    def __init__(self, role: Role, process: Process, link: Link) -> None:
        self.role = role
        self.last_metrics = ""
        self._process = process
        self._link = link
        self._reading = asyncio.create_task(link.run())

    @classmethod
    async def start(cls, role: Role, config: ServerConfig) -> Self:
        """Start the process."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", _MODULE, str(theirs.fileno())),
                stdin=PIPE,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # an interrupt from the terminal is for the supervisor, which tells all workers
            )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended already
            process.stdin.write(role.to_json(config))
            await process.stdin.drain()
        process.stdin.close()
        return cls(role, process, await Link.over(ours))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def loaded(self) -> list[LoadedModel]:
        """Return the configured models once they are loaded. Raises LinkLost if it cannot load them."""
        return [
            LoadedModel(
                name=one["name"],
                precision=one["precision"],
                description=pb.Model.FromString(base64.b64decode(one["description"])),
            )
            for one in await self._link.ask("loaded")
        ]

    async def serve(self) -> None:
        """Let it accept requests. Raises LinkLost."""
        await self._link.ask("serve")

    async def is_live(self) -> bool:
        """Return whether none of its engines hangs. Raises LinkLost."""
        return bool(await self._link.ask("is_live"))

    async def metrics(self, timeout_s: float) -> str:
        """Return its metrics in the OpenMetrics format, or those of its last answer if it gives none in time."""
        with contextlib.suppress(TimeoutError, LinkLost):
            self.last_metrics = await asyncio.wait_for(self._link.ask("metrics"), timeout_s)
        return self.last_metrics

    async def administer(self, method: str, message: bytes) -> bytes:
        """Call a method of its admin service. Raises AntiphonError or LinkLost."""
        return base64.b64decode(await self._link.ask(method, base64.b64encode(message).decode()))

    def stop(self) -> None:
        """Let it finish its requests and end."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._send(signal.SIGKILL)

    async def ended(self) -> int:
        """Wait for its end. Return its exit code, or minus the number of the signal that ended it."""
        code: Any = await self._process.wait()
        await self._reading
        return int(code)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
