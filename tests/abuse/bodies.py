"""Messages that are too large, have a wrong length, or grow when they are decompressed."""

import gzip
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from hyperframe.frame import ContinuationFrame, HeadersFrame

from tests.abuse.attack import Attack, Sent, Size, ended, played
from tests.abuse.calls import UNARY
from tests.abuse.raw_connection import MAX_FRAME_BYTES, RawConnection, framed

_GZIP = (("grpc-encoding", "gzip"),)
_MIB = 2**20
_NUM_CALLS = 8
"""Calls of a connection: one body of the larger ones is a megabyte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Body:
    """Bytes that follow the headers of a call.

    is_end: if off, the client stops without ending the stream. may_be_answered: gRPC accepts this body.
    """

    make: Callable[[], bytes]
    metadata: tuple[tuple[str, str], ...] = ()
    is_end: bool = True
    may_be_answered: bool = False


def body_attack(body: Body) -> Attack:
    """Return an attack of calls with a body, one after the other on each connection, until the server ends it."""

    async def play(connection: RawConnection, size: Size) -> Sent:
        for _ in range(_NUM_CALLS):
            stream_id = connection.headers(UNARY.method, metadata=body.metadata)
            await connection.body(stream_id, body.make(), is_end=body.is_end)
        await connection.flush()
        sent = await ended(connection, UNARY.method, size)
        return sent if body.may_be_answered else replace(sent, breaches=_answered(sent))

    return played(play)


def _answered(sent: Sent) -> tuple[str, ...]:
    return (f"{sent.ends['OK']} calls were answered that must be refused",) if sent.ends["OK"] else ()


def metadata_too_large(*, has_message: bool, acknowledges: bool) -> Attack:
    """Return an attack of calls with 100 KB of metadata. acknowledges: whether it acknowledges server settings."""

    async def play(connection: RawConnection, size: Size) -> Sent:
        await connection.greeted()
        for _ in range(_NUM_CALLS):
            stream_id = _long_headers(connection)
            if has_message:
                connection.data(stream_id, framed(UNARY.message), is_end=True)
        await connection.flush()
        # gRPC itself refuses such a call before it reaches the server.
        sent = Sent(partial=Counter({UNARY.method: _NUM_CALLS}), ends=await connection.ends(size.hold_s))
        return replace(sent, breaches=_answered(sent))

    return played(play, answers=acknowledges)


def _long_headers(connection: RawConnection) -> int:
    block = connection.header_block(UNARY.method, metadata=(("x-padding", "x" * 100_000),))
    stream_id = connection.next_id()
    connection.send(HeadersFrame(stream_id, block[:MAX_FRAME_BYTES]))
    starts = range(MAX_FRAME_BYTES, len(block), MAX_FRAME_BYTES)
    for start in starts:
        flags = ("END_HEADERS",) if start == starts[-1] else ()
        connection.send(ContinuationFrame(stream_id, block[start : start + MAX_FRAME_BYTES], flags=flags))
    return stream_id


@cache
def _bomb() -> bytes:
    """Return a message of 32 KB, within the limit of a megabyte, which has 32 MB after decompression."""
    return framed(gzip.compress(bytes(32 * _MIB), 9), is_compressed=True)


_NOISE = random.Random(1).randbytes(1000)
_BODIES: dict[str, Body] = {
    "message too large": Body(make=lambda: framed(bytes(2 * _MIB))),
    "length of 4 GB": Body(make=lambda: framed(b"x" * 100, length=2**32 - 1), is_end=False),
    "length beyond the end": Body(make=lambda: framed(UNARY.message, length=len(UNARY.message) + 100)),
    "length short of the end": Body(make=lambda: framed(UNARY.message, length=len(UNARY.message) - 3)),
    # gRPC ignores a second message of a unary call, and reads only one bit of the flags.
    "two messages": Body(make=lambda: framed(UNARY.message) * 2, may_be_answered=True),
    "no message": Body(make=bytes),
    "part of a prefix": Body(make=lambda: framed(UNARY.message)[:3]),
    "unknown flag": Body(make=lambda: b"\x07" + framed(UNARY.message)[1:], may_be_answered=True),
    "compressed, no encoding": Body(make=lambda: framed(gzip.compress(UNARY.message), is_compressed=True)),
    "compressed, noise": Body(make=lambda: framed(_NOISE, is_compressed=True), metadata=_GZIP),
    "unknown encoding": Body(
        make=lambda: framed(_NOISE, is_compressed=True), metadata=(("grpc-encoding", "unheard-of"),)
    ),
    "gzip bomb": Body(make=_bomb, metadata=_GZIP),
    "not a message": Body(make=lambda: framed(_NOISE)),
}
BODIES: dict[str, Attack] = {
    **{name: body_attack(body) for name, body in _BODIES.items()},
    "metadata too large": metadata_too_large(has_message=True, acknowledges=True),
    "metadata too large, no message": metadata_too_large(has_message=False, acknowledges=True),
    "metadata too large, settings not acknowledged": metadata_too_large(has_message=True, acknowledges=False),
}
