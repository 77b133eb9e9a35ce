"""Starts workers, replaces those that die or hang, and stops them together."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

from prometheus_client import CollectorRegistry

from antiphon.domain.errors import AntiphonError
from antiphon.observability.metrics import WorkerMetrics
from antiphon.server.ports import ReadyModel
from antiphon.server.settings import ServerConfig
from antiphon.server.workers.division import Division, Role
from antiphon.server.workers.fronts import send_end
from antiphon.server.workers.link import Link, LinkLost, WorkerSpec
from antiphon.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

_LIVENESS_INTERVAL_S = 1.0
# Waits before a worker is started again: one that dies at once must not occupy the machine.
_BACKOFF_S = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
# A worker that has served for this time has not died at once.
_STABLE_S = 60.0
# Beyond the time that a worker takes to drain.
_END_GRACE_S = 15.0
_MODULE = "antiphon.server.workers.worker"


class WorkerFailed(Exception):
    """A worker could not start, and has said why. code: its exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"a worker ended with {code} before it could serve")
        self.code = code


class WorkerProcess:
    """One worker, from its start to its end. For the event loop.

    last_metrics: its last exposition, which remains when it dies.
    """

    def __init__(self, spec: WorkerSpec, process: subprocess.Popen[bytes], link: Link, meeting: socket.socket) -> None:
        self.spec = spec
        self.last_metrics = ""
        self._process = process
        self._link = link
        self._meeting = meeting
        self._reading = asyncio.create_task(link.run())
        self._exit = asyncio.create_task(_exit_code(process))

    @classmethod
    async def start(cls, spec: WorkerSpec, config: ServerConfig) -> Self:
        """Start the process. Raises OSError."""
        process, end, meeting = _spawn(spec.to_json(config))
        return cls(spec, process, await Link.over(end), meeting)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def introduce(self, other: WorkerProcess) -> None:
        """Give this process and another an end each of a new pair of sockets."""
        ends = socket.socketpair()
        for worker, end in zip((self, other), ends, strict=True):
            with end, contextlib.suppress(OSError):  # it has ended: its successor is introduced
                send_end(worker._meeting, end)

    async def loaded(self) -> list[ReadyModel]:
        """Return the configured models once they are loaded. Raises LinkLost if it cannot load them."""
        return [
            ReadyModel(
                name=model["name"],
                precision=model["precision"],
                description=pb.Model.FromString(base64.b64decode(model["description"])),
            )
            for model in await self._link.call("loaded")
        ]

    async def serve(self) -> None:
        """Let it accept requests. Raises LinkLost."""
        await self._link.call("serve")

    async def is_live(self) -> bool:
        """Return whether none of its engines hangs. Raises LinkLost."""
        return bool(await self._link.call("is_live"))

    async def metrics(self, timeout_s: float) -> str:
        """Return its metrics in the OpenMetrics format, or those of its last answer if it gives none in time."""
        with contextlib.suppress(TimeoutError, LinkLost):
            self.last_metrics = await asyncio.wait_for(self._link.call("metrics"), timeout_s)
        return self.last_metrics

    async def administer(self, method: str, message: bytes) -> bytes:
        """Call a method of its admin service. Raises AntiphonError or LinkLost."""
        return base64.b64decode(await self._link.call(method, base64.b64encode(message).decode()))

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
        self._meeting.close()
        return code

    def _send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


Serve = Callable[[], Awaitable[None]]
CatchUp = Callable[[WorkerProcess, Serve], Awaitable[None]]
"""Brings a new worker to the state of the others, and then makes it serve."""


class Supervisor:
    """All workers of a server. For the event loop.

    config: of each worker, with the port that they share. on_change: called when the number of serving workers
    changes. on_ended: called with the last metrics of a worker that has ended.
    """

    def __init__(
        self,
        config: ServerConfig,
        divisions: Sequence[Division],
        registry: CollectorRegistry,
        *,
        on_change: Callable[[], Awaitable[None]],
        on_ended: Callable[[str], None],
    ) -> None:
        self._config = config
        self._divisions = divisions
        self._on_change = on_change
        self._on_ended = on_ended
        self._serving: dict[int, WorkerProcess] = {}
        self._all: set[WorkerProcess] = set()
        self._stopping = asyncio.Event()
        self._metrics = WorkerMetrics(registry, len(divisions), lambda: len(self._serving))

    @property
    def is_ready(self) -> bool:
        """True while calls can be answered."""
        roles = {worker.spec.role for worker in self._serving.values()}
        return Role.BOTH in roles or {Role.ENGINE, Role.FRONT} <= roles

    @property
    def serving(self) -> list[WorkerProcess]:
        """Workers that accept requests, by index."""
        return [self._serving[index] for index in sorted(self._serving)]

    async def start(self) -> list[ReadyModel]:
        """Start all workers and let them serve together. Return their models. Raises WorkerFailed.

        The first one starts alone: what is wrong with a bundle is said once, and what it measures is not disturbed. If
        there are fronts, it is their engine.
        """
        first = await self._start(0, opens_early=True)
        models = await self._loaded(first)
        rest = await asyncio.gather(*(self._start(index, opens_early=True) for index in range(1, len(self._divisions))))
        await asyncio.gather(*(self._loaded(worker) for worker in rest))
        for worker in (first, *rest):
            await self._serve(worker)
        return models

    async def keep(self, catch_up: CatchUp) -> None:
        """Replace every worker that ends or hangs, until cancelled."""
        await asyncio.gather(*(self._keep(index, catch_up) for index in range(len(self._divisions))))

    async def stop(self) -> int:
        """Let all workers finish their requests and end. Return the largest of their exit codes."""
        self._stopping.set()
        workers = list(self._all)
        for worker in workers:
            worker.stop()
        ending = asyncio.gather(*(worker.ended() for worker in workers))
        limit_s = self._config.drain_delay_s + self._config.drain_grace_s + _END_GRACE_S
        try:
            codes = await asyncio.wait_for(asyncio.shield(ending), limit_s)
        except TimeoutError:
            for worker in workers:
                log.error("worker %d does not end; it is killed", worker.spec.index)
                worker.kill()
            codes = await ending
        return max((code if code >= 0 else 1 for code in codes), default=0)

    async def _keep(self, index: int, catch_up: CatchUp) -> None:
        worker: WorkerProcess | None = self._serving[index]
        num_failures, began_s = 0, self._now_s()
        while not self._stopping.is_set():
            if worker is not None:
                await self._until_ended(worker)
                if self._stopping.is_set():
                    return
                num_failures = 0 if self._now_s() - began_s > _STABLE_S else num_failures
            await asyncio.sleep(_BACKOFF_S[min(num_failures, len(_BACKOFF_S) - 1)])
            num_failures, began_s = num_failures + 1, self._now_s()
            worker = await self._replace(index, catch_up)

    async def _replace(self, index: int, catch_up: CatchUp) -> WorkerProcess | None:
        """Start a worker in the place of another. Return None if it cannot serve."""
        self._metrics.restarted()
        try:
            worker = await self._start(index, opens_early=False)
        except OSError as error:  # no memory, no process, no descriptor
            log.error("worker %d cannot be started: %s", index, error)
            return None
        try:
            await self._loaded(worker)
            await catch_up(worker, lambda: self._serve(worker))
        except (WorkerFailed, LinkLost, AntiphonError) as error:
            log.error("worker %d cannot take its place: %s", index, error)
            worker.kill()
            await self._forget(worker)
            return None
        log.info("worker %d serves again, as process %d", index, worker.pid)
        return worker

    async def _until_ended(self, worker: WorkerProcess) -> None:
        watching = asyncio.create_task(self._kill_if_hung(worker))
        try:
            code = await worker.ended()
        finally:
            watching.cancel()
        await self._forget(worker)
        if not self._stopping.is_set():
            what = f"signal {-code}" if code < 0 else f"exit code {code}"
            log.error("worker %d has ended with %s; another takes its place", worker.spec.index, what)

    async def _forget(self, worker: WorkerProcess) -> None:
        await worker.ended()
        self._all.discard(worker)
        if self._serving.get(worker.spec.index) is worker:
            del self._serving[worker.spec.index]
            self._on_ended(worker.last_metrics)
            await self._on_change()

    async def _kill_if_hung(self, worker: WorkerProcess) -> None:
        """Kill a worker whose engine hangs, or whose event loop does not answer."""
        with contextlib.suppress(LinkLost):
            while True:
                if not await self._is_live(worker):
                    break
                await asyncio.sleep(_LIVENESS_INTERVAL_S)
            log.critical("worker %d hangs; it is killed", worker.spec.index)
            worker.kill()

    async def _is_live(self, worker: WorkerProcess) -> bool:
        try:
            return await asyncio.wait_for(worker.is_live(), self._config.watchdog_timeout_s)
        except TimeoutError:
            return False

    async def _start(self, index: int, *, opens_early: bool) -> WorkerProcess:
        division = self._divisions[index]
        spec = WorkerSpec(
            index=index,
            num_workers=len(self._divisions),
            role=division.role,
            cores=division.cores,
            opens_early=opens_early,
        )
        config = self._config.model_copy(update={"threads": division.threads})
        worker = await WorkerProcess.start(spec, config)
        self._introduce(worker)
        self._all.add(worker)
        if self._stopping.is_set():
            worker.stop()
        return worker

    def _introduce(self, worker: WorkerProcess) -> None:
        """Introduce a new process to the others that it works with: a front to the engine, an engine to the fronts."""
        partners = {Role.FRONT: Role.ENGINE, Role.ENGINE: Role.FRONT}
        for other in self._all:
            if other.spec.role is partners.get(worker.spec.role):
                worker.introduce(other)

    async def _loaded(self, worker: WorkerProcess) -> list[ReadyModel]:
        try:
            return await worker.loaded()
        except LinkLost:
            raise WorkerFailed(await worker.ended()) from None

    async def _serve(self, worker: WorkerProcess) -> None:
        try:
            await worker.serve()
        except LinkLost:
            raise WorkerFailed(await worker.ended()) from None
        self._serving[worker.spec.index] = worker
        await self._on_change()

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def _spawn(spec: bytes) -> tuple[subprocess.Popen[bytes], socket.socket, socket.socket]:
    """Start a process with its specification. Return it, this end of the link and of introductions. Raises OSError.

    Not by the event loop, whose fork would make gRPC write a line about it: subprocess uses vfork.
    """
    link, their_link = socket.socketpair()
    meeting, their_meeting = socket.socketpair()
    with their_link, their_meeting:
        descriptors = (their_link.fileno(), their_meeting.fileno())
        process = subprocess.Popen(
            (sys.executable, "-m", _MODULE, *map(str, descriptors)),
            stdin=subprocess.PIPE,
            pass_fds=descriptors,
            start_new_session=True,  # an interrupt from the terminal is for the supervisor, which tells all workers
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # it may have ended already
        process.stdin.write(spec)
    return process, link, meeting


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
