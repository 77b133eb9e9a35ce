"""Attacks with calls: unread answers, incomplete requests, and calls that are reset at once."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from h2.settings import SettingCodes
from hyperframe.frame import ContinuationFrame, HeadersFrame

from tests.abuse.attack import Attack, Sent, Size, ended, on_each, played, total
from tests.abuse.calls import (
    HEALTH_METHOD,
    HEAVY_MANY,
    HEAVY_STREAM,
    HEAVY_UNARY,
    LONG_UNARY,
    MANY,
    REFLECTION,
    REFLECTION_METHOD,
    STREAM,
    UNARY,
    UNKNOWN_METHOD,
    UNKNOWN_SERVICE_METHOD,
    Call,
)
from tests.abuse.raw_connection import DEFAULT_WINDOW, MAX_WINDOW, OPEN, Address, RawConnection, framed

_NUM_REPLACED = 5
"""Connections that one attacker opens, one after the other."""
NO_WINDOW = {SettingCodes.INITIAL_WINDOW_SIZE: 0}
FULL_WINDOW = {SettingCodes.INITIAL_WINDOW_SIZE: MAX_WINDOW}


async def _calls_that_are_read(connection: RawConnection, size: Size) -> Sent:
    for number in range(size.calls):
        call = (UNARY, LONG_UNARY, HEAVY_UNARY, STREAM)[number % 4]
        connection.call(call.method, call.message)
    await connection.flush()
    return Sent(ends=await connection.ends(size.hold_s))


# Calls of the attacks, whose answers are read, so that the server has all memory that it needs.
calls_that_are_read = played(_calls_that_are_read)
Meanwhile = Callable[[RawConnection, Sequence[int], Size], Awaitable[None]]


def unended(
    call: Call,
    settings: Mapping[SettingCodes, int] | None = None,
    *,
    is_sent: bool = True,
    meanwhile: Meanwhile | None = None,
    divisor: int = 1,
) -> Attack:
    """Return an attack of calls that only the server can end.

    is_sent: whether the calls have their message. meanwhile: runs with the ids of the streams until the calls end.
    settings: windows of the answers, which then do not grow by themselves. divisor: of the calls on each connection,
    where each keeps the model busy.
    """

    async def play(connection: RawConnection, size: Size) -> Sent:
        await connection.greeted()
        ids = [
            connection.call(call.method, call.message) if is_sent else connection.headers(call.method)
            for _ in range(-(-size.calls // divisor))
        ]
        await connection.flush()
        beside = asyncio.ensure_future(meanwhile(connection, ids, size) if meanwhile else asyncio.sleep(0))
        sent = await ended(connection, call.method, size, call)
        beside.cancel()
        await asyncio.wait({beside})
        return sent

    return played(play, settings, gives_credit=settings is None)


async def _grant_bytes(connection: RawConnection, stream_ids: Sequence[int], size: Size) -> None:
    """Let each window grow by one byte at each interval."""
    await _drip(connection, stream_ids, size, lambda stream_id: connection.grant(1, stream_id))


async def _send_bytes(connection: RawConnection, stream_ids: Sequence[int], size: Size) -> None:
    """Send single bytes of a message that is too long to arrive during the attack."""
    message = framed(bytes(round(size.hold_s / size.interval_s)))
    sent = dict.fromkeys(stream_ids, 0)

    def send(stream_id: int) -> None:
        connection.data(stream_id, message[sent[stream_id] : sent[stream_id] + 1])
        sent[stream_id] += 1

    await _drip(connection, stream_ids, size, send)


async def _drip(connection: RawConnection, stream_ids: Sequence[int], size: Size, do: Callable[[int], None]) -> None:
    for _ in range(round(size.hold_s / size.interval_s)):
        for stream_id in stream_ids:
            if connection.streams[stream_id].end == OPEN:
                do(stream_id)
        await connection.flush()
        await asyncio.sleep(size.interval_s)


async def _send_all_but_the_last_byte(connection: RawConnection, stream_ids: Sequence[int], size: Size) -> None:
    """Send messages of nearly a megabyte, as far as the server's windows allow."""
    body = framed(bytes((1 << 20) - 8))[:-1]
    await asyncio.gather(*(connection.body(stream_id, body, is_end=False) for stream_id in stream_ids))


async def socket_never_read(address: Address, size: Size) -> Sent:
    """Make calls with sufficient windows on a connection that the client does not read."""

    async def play(connection: RawConnection, size: Size) -> Sent:
        connection.grant(MAX_WINDOW - DEFAULT_WINDOW)
        connection.stop_reading()
        for _ in range(size.calls):
            connection.call(HEAVY_UNARY.method, HEAVY_UNARY.message)
        await connection.flush()
        # The client receives nothing more; the server's metrics report the ends of the calls.
        await asyncio.sleep(size.unread_s)
        return Sent(whole=Counter({HEAVY_UNARY.method: size.calls}))

    return await played(play, FULL_WINDOW)(replace(address, receive_buffer_bytes=4096), size)


async def _more_streams_than_allowed(connection: RawConnection, size: Size) -> Sent:
    """Make four times the allowed calls, without messages."""
    await connection.greeted()
    for _ in range(4 * size.calls):
        connection.headers(UNARY.method)
    await connection.flush()
    ends = await connection.ends(size.hold_s)
    # gRPC itself refuses the excess calls before they reach the server.
    return Sent(partial=Counter({UNARY.method: ends.total()}), ends=ends)


async def _slow_headers(connection: RawConnection, size: Size) -> Sent:
    """Send headers one byte of a CONTINUATION frame at each interval, without an end."""
    block = connection.header_block(UNARY.method, metadata=(("x-padding", "x" * 1000),))
    stream_id = connection.next_id()
    connection.send(HeadersFrame(stream_id, block[:1]))
    for byte in block[1 : round(size.hold_s / size.interval_s)]:
        connection.send(ContinuationFrame(stream_id, bytes([byte])))
        await connection.flush()
        if await connection.wait_closed(size.interval_s):
            break
    return Sent(ends=Counter([connection.state]))


def rapid_reset(call: Call = UNARY, *, is_sent: bool = True) -> Attack:
    """Return an attack of calls that are reset after their whole request, or after their headers."""

    async def play(connection: RawConnection, size: Size) -> Sent:
        for number in range(size.frames):
            reset = connection.call(call.method, call.message) if is_sent else connection.headers(call.method)
            connection.reset(reset)
            if number % 64 == 0:
                await connection.flush()
                await asyncio.sleep(0)  # lets the reader see a GOAWAY
            if connection.is_closed:
                break
        await connection.flush()
        await connection.wait_closed(min(0.5, size.hold_s))
        num_calls = len(connection.streams)
        ends = Counter({f"connection {connection.goaway or 'stands'}": 1})
        return Sent(partial=Counter({call.method: num_calls}) + call.requests_of(num_calls), ends=ends)

    return played(play)


async def rapid_reset_again_and_again(address: Address, size: Size) -> Sent:
    """Reset calls on many connections. Whenever one has made its calls, another takes its place."""
    alone = replace(size, connections=1, frames=min(size.frames, 1000))
    reset = rapid_reset(is_sent=False)

    async def one() -> Sent:
        return total([await reset(address, alone) for _ in range(_NUM_REPLACED)])

    return await on_each(replace(size, connections=4 * size.connections), one)


STREAM_ATTACKS: dict[str, Attack] = {
    "window 0, unary": unended(UNARY, NO_WINDOW),
    "window 0, streams": unended(STREAM, NO_WINDOW),
    "window 0, many requests": unended(MANY, NO_WINDOW),
    "window 0, log-probabilities": unended(HEAVY_STREAM, NO_WINDOW, divisor=20),
    "window 0, many requests with log-probabilities": unended(HEAVY_MANY, NO_WINDOW, divisor=30),
    "window 0, reflection": unended(REFLECTION, NO_WINDOW),
    "window by single bytes, unary": unended(LONG_UNARY, NO_WINDOW, meanwhile=_grant_bytes),
    "window by single bytes, streams": unended(STREAM, NO_WINDOW, meanwhile=_grant_bytes),
    "window by single bytes, log-probabilities": unended(HEAVY_STREAM, NO_WINDOW, meanwhile=_grant_bytes, divisor=20),
    "connection window never grows": unended(LONG_UNARY, FULL_WINDOW),
    "socket never read": socket_never_read,
    "headers only, unary": unended(UNARY, is_sent=False),
    "headers only, streams": unended(STREAM, is_sent=False),
    "headers only, health": unended(Call(method=HEALTH_METHOD, message=b""), is_sent=False),
    "headers only, reflection": unended(Call(method=REFLECTION_METHOD, message=b""), is_sent=False),
    "headers only, unknown method": unended(Call(method=UNKNOWN_METHOD, message=b""), is_sent=False),
    "headers only, unknown service": unended(Call(method=UNKNOWN_SERVICE_METHOD, message=b""), is_sent=False),
    "more streams than allowed": played(_more_streams_than_allowed),
    "more streams than allowed, settings not acknowledged": played(_more_streams_than_allowed, answers=False),
    "slow message": unended(UNARY, is_sent=False, meanwhile=_send_bytes),
    "slow headers": played(_slow_headers),
    "large messages without their end": unended(UNARY, is_sent=False, meanwhile=_send_all_but_the_last_byte, divisor=4),
    "rapid reset": rapid_reset(is_sent=False),
    "rapid reset, again and again": rapid_reset_again_and_again,
    "rapid reset of whole calls": rapid_reset(),
    "rapid reset of streams": rapid_reset(STREAM),
    "rapid reset of many requests": rapid_reset(MANY),
}
