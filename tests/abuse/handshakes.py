"""Attacks before any call: silent connections, partial ClientHellos, and invalid certificates."""

import asyncio
import contextlib
import random
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from tests.abuse.attack import Attack, Sent, Size, on_each
from tests.abuse.calls import UNARY
from tests.abuse.raw_connection import PREFACE, Address, RawConnection

# The first bytes of a ClientHello, which announce 508 more.
HELLO_PART = bytes.fromhex("1603010200010001fc0303")
_RESET = struct.pack("ii", 1, 0)
_ANSWER_S = 5


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await replace(address, tls=None).connect()


def storm(first: bytes, *, is_reset: bool = False) -> Attack:
    """Return an attack that repeatedly connects, sends a few bytes and closes. is_reset: close with RST, not FIN."""

    async def attack(address: Address, size: Size) -> Sent:
        async def one() -> Sent:
            for _ in range(size.storm):
                with contextlib.suppress(OSError):
                    _, writer = await _connect(address)
                    if is_reset:
                        connected: socket.socket = writer.get_extra_info("socket")
                        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    writer.write(first)
                    writer.close()
                    await writer.wait_closed()
            return Sent()

        return await on_each(size, one)

    return attack


async def handshake_storm(address: Address, size: Size) -> Sent:
    """Repeatedly connect, with TLS handshake and preface, and abort the connection."""

    async def one() -> Sent:
        for _ in range(size.storm):
            with contextlib.suppress(OSError):
                async with await RawConnection.open(address) as connection:
                    await connection.flush()
        return Sent()

    return await on_each(size, one)


def kept(connect: Callable[[Address, Size], Awaitable[bool]]) -> Attack:
    """Return an attack of `storm` connections that are kept open. connect: returns whether the server closed one."""

    async def attack(address: Address, size: Size) -> Sent:
        async def one() -> str:
            try:
                return "connection closed" if await connect(address, size) else "connection stands"
            except (OSError, TimeoutError):
                return "connection refused"

        return Sent(ends=Counter(await asyncio.gather(*(one() for _ in range(size.storm)))))

    return attack


def held(first: bytes) -> Attack:
    """Return an attack that sends a few bytes on each connection, and waits for the server to close it, or hold_s."""

    async def connect(address: Address, size: Size) -> bool:
        reader, writer = await _connect(address)
        writer.write(first)
        reading = asyncio.ensure_future(reader.read())
        try:
            done, _ = await asyncio.wait({reading}, timeout=size.hold_s)
            await asyncio.gather(*done)
            return bool(done)
        finally:
            reading.cancel()
            writer.transport.abort()

    return kept(connect)


async def _idle(address: Address, size: Size) -> bool:
    async with await RawConnection.open(address, answers=False) as connection:
        await connection.flush()
        return await connection.wait_closed(size.hold_s)


# Connections, with TLS if the server has it, that are silent after the preface.
idle_connections = kept(_idle)


def strangers(contexts: Mapping[str, ssl.SSLContext]) -> Attack:
    """Return an attack of calls with certificates that the server must refuse. ends: "NAME: refused", or the end."""

    async def attack(address: Address, size: Size) -> Sent:
        ends: Counter[str] = Counter()
        for name, context in contexts.items():
            stranger = replace(address, tls=context)
            for _ in range(size.storm):
                ends[f"{name}: {await _ask(stranger)}"] += 1
        let_in = tuple(f"{number} calls: {end}" for end, number in ends.items() if not end.endswith(": refused"))
        return Sent(ends=ends, breaches=let_in)

    return attack


async def _ask(address: Address) -> str:
    try:
        async with await RawConnection.open(address) as connection:
            connection.call(UNARY.method, UNARY.message)
            await connection.flush()
            (end,) = await connection.ends(_ANSWER_S)
            return "refused" if end == "closed" else end
    except OSError:
        return "refused"


_GARBAGE = random.Random(1).randbytes(4096)

HANDSHAKES: dict[str, Attack] = {
    "connection storm": storm(b""),
    "connection storm, RST": storm(b"", is_reset=True),
    "connection storm, part of a hello": storm(HELLO_PART),
    "connection storm, garbage": storm(_GARBAGE),
    "connection storm, HTTP/1.1": storm(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "connection storm, plaintext preface": storm(PREFACE),
    "handshake storm": handshake_storm,
    "held connections, silent": held(b""),
    "held connections, part of a hello": held(HELLO_PART),
    "idle connections": idle_connections,
}
