"""Fronts of an engine: the sockets between their processes, and what each does about the other.

The supervisor makes a pair of sockets for each front and sends one to the front and one to the engine. So no other
process can reach an engine, no port or file is left behind, and a process that takes the place of another is introduced
in the same way.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Mapping

from antiphon.engine.engine import Engine
from antiphon.engine.remote import EngineLink, FrontLink, Load, LocalModel, RemoteModel
from antiphon.rpc.standard_services import Probes
from antiphon.rpc.v1.models import LoadedModel
from antiphon.server.models.control import Control
from antiphon.server.workers.link import WorkerSpec

log = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 0.1
_FLUSH_S = 3.0
_FLUSH_CHECK_S = 0.01


def send_end(meeting: socket.socket, end: socket.socket) -> None:
    """Send a socket to the process at the other end of another one. Raises OSError."""
    socket.send_fds(meeting, [b"\0"], [end.fileno()])


def _on_ends(meeting: socket.socket, use: Callable[[socket.socket], object]) -> None:
    """Call a function with each socket that arrives at this end. For the event loop."""
    meeting.setblocking(False)
    loop = asyncio.get_running_loop()

    def receive() -> None:
        data, descriptors, _, _ = socket.recv_fds(meeting, 1, 1)
        if not data:
            loop.remove_reader(meeting)  # the supervisor has ended, and so does this process
        for descriptor in descriptors:
            use(socket.socket(fileno=descriptor))

    loop.add_reader(meeting, receive)


class Fronts:
    """The fronts of the engines of this process. For the event loop."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._links: set[FrontLink] = set()
        self._models: Mapping[str, LocalModel] = {}
        self._loads: Mapping[str, Load] = {}
        control.on_change = self._announce

    def meet(self, meeting: socket.socket) -> None:
        """Link the fronts whose sockets arrive."""
        _on_ends(meeting, self._add)

    async def run(self, probes: Probes) -> None:
        """Report the load of the engines to the fronts until cancelled. probes: nobody asks those of this process."""
        while True:
            loads = {served.name: _load_of(served) for served in self._control.models}
            if loads != self._loads:
                for link in self._links:
                    link.report(loads)
                self._loads = loads
            await asyncio.sleep(_REPORT_INTERVAL_S)

    async def flush(self) -> None:
        """Wait until the fronts have taken the last messages, or for some seconds."""
        for _ in range(int(_FLUSH_S / _FLUSH_CHECK_S)):
            if not any(link.num_unsent_bytes for link in self._links):
                return
            await asyncio.sleep(_FLUSH_CHECK_S)

    def _add(self, end: socket.socket) -> None:
        link = FrontLink(end, lambda: self._models, self._links.discard)
        link.report(self._loads)
        self._links.add(link)

    def _announce(self) -> None:
        self._models = {served.name: _local(served) for served in self._control.models}
        for link in self._links:
            link.announce()


def _local(served: LoadedModel) -> LocalModel:
    assert isinstance(served.engine, Engine)
    facts = RemoteModel.of(served.engine, served.description.SerializeToString())
    return LocalModel(engine=served.engine, tokenizer=served.servicer.tokenizer, facts=facts)


def _load_of(served: LoadedModel) -> Load:
    engine = served.engine
    return Load(num_running=engine.num_running, num_waiting=engine.num_waiting, num_free_blocks=engine.num_free_blocks)


class Front:
    """The process of the engines, for a front. For the event loop."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._changed = asyncio.Event()
        self._is_there = True
        self.link = EngineLink(
            lambda is_there: self._note(is_there=is_there), index=spec.index - 1, num=spec.num_answering
        )

    def meet(self, meeting: socket.socket) -> None:
        """Use the process of the engines whose socket arrives."""
        _on_ends(meeting, self.link.attach)

    async def run(self, probes: Probes) -> None:
        """Report readiness, until cancelled: a front without engines refuses everything."""
        while True:
            await probes.ready(is_ready=self._is_there)
            await self._changed.wait()
            self._changed.clear()

    def _note(self, *, is_there: bool) -> None:
        if is_there != self._is_there:
            log.info("the process of the engine %s", "serves again" if is_there else "has ended")
        self._is_there = is_there
        self._changed.set()
