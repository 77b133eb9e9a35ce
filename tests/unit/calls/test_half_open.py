"""Connections whose other end disappears silently: the server's pings notice it, and their blocks are freed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio

from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.serving import Gate, asking, serving


class Wire:
    """Forwards bytes between a client and a server until it is cut. Then it discards them and closes nothing."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._may_carry = asyncio.Event()
        self._may_carry.set()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def laid(self) -> AsyncIterator[str]:
        """Forward bytes until the context exits. Yields the address for clients."""
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._may_carry.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        for source, target in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.ensure_future(self._carry(source, target)))

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.closing(target):
            while data := await source.read(65536):
                await self._may_carry.wait()
                target.write(data)


async def test_half_open_connection_gives_up_its_requests() -> None:
    async with serving(keepalive_time_s=1, keepalive_timeout_s=0.5) as served:
        gate, wire = Gate(served.runner), Wire(served.target)
        async with wire.laid() as target, grpc.aio.insecure_channel(target) as channel:
            call = InferenceServiceStub(channel).Generate(asking((30, 30)))
            assert await asyncio.to_thread(gate.reached.wait, 60)
            wire.cut()
            async with asyncio.timeout(60):
                await served.calls.wait_until_idle()
            gate.open()
            assert await asyncio.to_thread(served.engine.drain, 60)
            call.cancel()
        assert len(served.runner.decoded_rows) == 1
        labels = {"model_name": "fake", "stage": "running", "cause": "client"}
        assert served.registry.get_sample_value("antiphon_cancellations_total", labels) == 1
