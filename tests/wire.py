"""Bytes that a server sends. gRPC shows applications neither load reports nor answers to pings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from xds.data.orca.v3.orca_load_report_pb2 import OrcaLoadReport

_KEY = b"endpoint-load-metrics-bin"
# The first bytes of a PING frame that answers another (RFC 9113, 6.7): length 8, type, flag ACK, stream 0.
_PING_ANSWER = bytes((0, 0, 8, 6, 1, 0, 0, 0, 0))


@dataclass(slots=True)
class Tap:
    """Relay in front of a server.

    target: address for clients. num_connections: from clients so far. received: bytes that the server has sent so far.
    """

    target: str = ""
    num_connections: int = 0
    received: bytearray = field(default_factory=bytearray)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for_pings(self, number: int) -> None:
        """Wait until the server has answered this number of pings in `received`."""
        while self.received.count(_PING_ANSWER) < number:
            self.arrived.clear()
            await self.arrived.wait()

    def take_reports(self) -> list[OrcaLoadReport]:
        """Return the load reports received since the last call.

        gRPC sends header names unchanged. To peers that accept it, gRPC sends the value of a -bin header after a zero
        byte. The length of the value comes before, as an HPACK integer with a prefix of 7 bits (RFC 7541, 5.1).
        """
        data = bytes(self.received)
        self.received.clear()
        reports = []
        while (found := data.find(_KEY)) >= 0:
            data = data[found + len(_KEY) :]
            length, start = data[0] & 0x7F, 1
            if length == 0x7F:
                shift = 0
                while True:
                    length += (data[start] & 0x7F) << shift
                    shift, start = shift + 7, start + 1
                    if data[start - 1] < 0x80:
                        break
            assert data[start] == 0
            reports.append(OrcaLoadReport.FromString(data[start + 1 : start + length]))
        return reports


@contextlib.asynccontextmanager
async def tapped(target: str) -> AsyncIterator[Tap]:
    """Relay connections to a server on this machine, and close them at the end."""
    tap, relays, writers = Tap(), list[asyncio.Future[None]](), list[asyncio.StreamWriter]()
    host, _, port = target.rpartition(":")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray | None) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if kept is not None:
                    kept += data
                    tap.arrived.set()
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tap.num_connections += 1
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        writers.extend((writer, server_writer))
        relays.append(asyncio.ensure_future(pump(reader, server_writer, None)))
        relays.append(asyncio.ensure_future(pump(server_reader, writer, tap.received)))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    tap.target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield tap
    finally:
        server.close()
        for writer in writers:
            writer.close()
        await asyncio.gather(*relays)
