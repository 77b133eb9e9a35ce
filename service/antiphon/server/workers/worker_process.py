"""Process of one worker, as its supervisor sees it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import Self

from antiphon.server.settings import ServerConfig
from antiphon.server.workers.link import Link, LinkLost
from antiphon.server.workers.role import Role
from antiphon.v1 import inference_pb2 as pb

_MODULE = "antiphon.server.workers.worker"


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

    def __init__(self, role: Role, process: subprocess.Popen[bytes], link: Link) -> None:
        self.role = role
        self.last_metrics = ""
        self._process = process
        self._link = link
        self._reading = asyncio.create_task(link.run())
        self._exit = asyncio.create_task(_exit_code(process))

    @classmethod
    async def start(cls, role: Role, config: ServerConfig) -> Self:
        """Start the process. Raises OSError."""
        process, end = _spawn(role.to_json(config))
        return cls(role, process, await Link.over(end))

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
        code = await asyncio.shield(self._exit)
        await self._reading
        return code

    def _send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


def _spawn(role: bytes) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process with its role. Return it and this end of the link. Raises OSError.

    Not by the event loop, whose fork would make gRPC write a line about it: subprocess uses vfork.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            (sys.executable, "-m", _MODULE, str(theirs.fileno())),
            stdin=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # an interrupt from the terminal is for the supervisor, which tells all workers
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # it may have ended already
        process.stdin.write(role)
    return process, ours


async def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process without a thread."""
    loop, has_ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, has_ended.set)
    try:
        await has_ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()
