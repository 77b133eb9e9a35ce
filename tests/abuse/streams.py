"""Attacks with calls: unread answers, incomplete requests, and calls that are reset at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from h2.settings import SettingCodes
from hyperframe.frame import ContinuationFrame, HeadersFrame

from tests.abuse.attack import Attack, Sent, Size, ended, on_each, total
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


async def calls_that_are_read(address: Address, size: Size) -> Sent:
    """Make the calls of the attacks and read their answers, so that the server has all memory that it needs."""

    async def one() -> Sent:
        async with await RawConnection.open(address) as connection:
            for number in range(size.calls):
                call = (UNARY, LONG_UNARY, HEAVY_UNARY, STREAM)[number % 4]
                connection.call(call.method, call.message)
            await connection.flush()
            return Sent(ends=await connection.ends(size.hold_s))

    return await on_each(size, one)


def window_zero(call: Call) -> Attack:
    """Return an attack of complete calls without a window for their answers, on connections that are read."""

    async def attack(address: Address, size: Size) -> Sent:
        async def one() -> Sent:
            async with await RawConnection.open(address, NO_WINDOW, gives_credit=False) as connection:
                for _ in range(size.calls):
                    connection.call(call.method, call.message)
                await connection.flush()
                return await ended(connection, call.method, size, call)

        return await on_each(size, one)

    return attack


def fewer(divisor: int, attack: Attack) -> Attack:
    """Return an attack with fewer calls on each connection, because each of them keeps the model busy."""

    async def smaller(address: Address, size: Size) -> Sent:
        return await attack(address, replace(size, calls=-(-size.calls // divisor)))

    return smaller


def window_by_single_bytes(call: Call) -> Attack:
    """Return an attack of complete calls whose window starts at 0 and grows by one byte at each interval."""

    async def attack(address: Address, size: Size) -> Sent:
        async def one() -> Sent:
            async with await RawConnection.open(address, NO_WINDOW, gives_credit=False) as connection:
                stream_ids = [connection.call(call.method, call.message) for _ in range(size.calls)]
                granting = asyncio.ensure_future(_grant_bytes(connection, stream_ids, size))
                sent = await ended(connection, call.method, size, call)
                granting.cancel()
                await asyncio.wait({granting})
                return sent

        return await on_each(size, one)

    return attack


async def _grant_bytes(connection: RawConnection, stream_ids: Sequence[int], size: Size) -> None:
    for _ in range(round(size.hold_s / size.interval_s)):
        for stream_id in stream_ids:
            if connection.streams[stream_id].end == OPEN:
                connection.grant(1, stream_id)
        await connection.flush()
        await asyncio.sleep(size.interval_s)


async def connection_window_never_grows(address: Address, size: Size) -> Sent:
    """Make calls whose answers together exceed the connection's window, which never grows."""

    async def one() -> Sent:
        async with await RawConnection.open(address, FULL_WINDOW, gives_credit=False) as connection:
            for _ in range(size.calls):
                connection.call(LONG_UNARY.method, LONG_UNARY.message)
            await connection.flush()
            return await ended(connection, LONG_UNARY.method, size)

    return await on_each(size, one)


async def socket_never_read(address: Address, size: Size) -> Sent:
    """Make calls with sufficient windows on a connection that the client does not read."""

    async def one() -> Sent:
        async with await RawConnection.open(replace(address, receive_buffer_bytes=4096), FULL_WINDOW) as connection:
            connection.grant(MAX_WINDOW - DEFAULT_WINDOW)
            connection.stop_reading()
            for _ in range(size.calls):
                connection.call(HEAVY_UNARY.method, HEAVY_UNARY.message)
            await connection.flush()
            # The client receives nothing more; the server's metrics report the ends of the calls.
            await asyncio.sleep(size.unread_s)
            return Sent(whole=Counter({HEAVY_UNARY.method: size.calls}))

    return await on_each(size, one)


def more_streams_than_allowed(*, acknowledges: bool) -> Attack:
    """Return an attack of four times the allowed calls, without messages. acknowledges: the server's settings."""

    async def attack(address: Address, size: Size) -> Sent:
        async def one() -> Sent:
            async with await RawConnection.open(address, answers=acknowledges) as connection:
                await connection.greeted()
                for _ in range(4 * size.calls):
                    connection.headers(UNARY.method)
                await connection.flush()
                ends = await connection.ends(size.hold_s)
                # gRPC itself refuses the excess calls before they reach the server.
                return Sent(partial=Counter({UNARY.method: ends.total()}), ends=ends)

        return await on_each(size, one)

    return attack


def headers_only(method: str) -> Attack:
    """Make calls whose message never arrives."""

    async def attack(address: Address, size: Size) -> Sent:
        async def one() -> Sent:
            async with await RawConnection.open(address) as connection:
                for _ in range(size.calls):
                    connection.headers(method)
                await connection.flush()
                return await ended(connection, method, size)

        return await on_each(size, one)

    return attack


async def slow_message(address: Address, size: Size) -> Sent:
    """Make calls whose message arrives one byte at each interval."""

    async def one() -> Sent:
        async with await RawConnection.open(address) as connection:
            stream_ids = [connection.headers(UNARY.method) for _ in range(size.calls)]
            dripping = asyncio.ensure_future(_drip(connection, stream_ids, size))
            sent = await ended(connection, UNARY.method, size)
            dripping.cancel()
            await asyncio.wait({dripping})
            return sent

    return await on_each(size, one)


async def large_messages_without_their_end(address: Address, size: Size) -> Sent:
    """Send all bytes but the last of messages of nearly a megabyte, as far as the server's windows allow."""
    body = framed(bytes((1 << 20) - 8))[:-1]

    async def one() -> Sent:
        async with await RawConnection.open(address) as connection:
            await connection.greeted()
            stream_ids = [connection.headers(UNARY.method) for _ in range(size.calls)]
            bodies = [connection.body(stream_id, body, is_end=False) for stream_id in stream_ids]
            sending = [asyncio.ensure_future(coroutine) for coroutine in bodies]
            sent = await ended(connection, UNARY.method, size)
            for task in sending:
                task.cancel()
            await asyncio.wait(sending)
            return sent

    return await on_each(size, one)


async def _drip(connection: RawConnection, stream_ids: Sequence[int], size: Size) -> None:
    """Send single bytes of a message that is too long to arrive during the attack."""
    num_bytes = round(size.hold_s / size.interval_s)
    for byte in framed(bytes(num_bytes))[:num_bytes]:
        for stream_id in stream_ids:
            if connection.streams[stream_id].end == OPEN:
                connection.data(stream_id, bytes([byte]))
        await connection.flush()
        await asyncio.sleep(size.interval_s)


async def slow_headers(address: Address, size: Size) -> Sent:
    """Send headers one byte of a CONTINUATION frame at each interval, without an end."""

    async def one() -> Sent:
        async with await RawConnection.open(address) as connection:
            block = connection.header_block(UNARY.method, metadata=(("x-padding", "x" * 1000),))
            stream_id = connection.next_id()
            connection.send(HeadersFrame(stream_id, block[:1]))
            for byte in block[1 : round(size.hold_s / size.interval_s)]:
                connection.send(ContinuationFrame(stream_id, bytes([byte])))
                await connection.flush()
                if await connection.wait_closed(size.interval_s):
                    break
            end = connection.goaway or ("closed" if connection.is_closed else "stands")
            return Sent(ends=Counter({f"connection {end}": 1}))

    return await on_each(size, one)


def rapid_reset(call: Call | None = None) -> Attack:
    """Return an attack of calls that are reset after their headers, or after their whole request if one is given."""

    async def attack(address: Address, size: Size) -> Sent:
        async def one() -> Sent:
            async with await RawConnection.open(address) as connection:
                for number in range(size.frames):
                    stream_id = connection.headers(UNARY.method) if call is None else _called(connection, call)
                    connection.reset(stream_id)
                    if number % 64 == 0:
                        await connection.flush()
                        await asyncio.sleep(0)  # lets the reader see a GOAWAY
                    if connection.is_closed:
                        break
                await connection.flush()
                await connection.wait_closed(min(0.5, size.hold_s))
                method = UNARY.method if call is None else call.method
                ends = Counter({f"connection {connection.goaway or 'stands'}": 1})
                partial = Counter({method: len(connection.streams)})
                if call is not None:
                    partial += call.requests_of(len(connection.streams))
                return Sent(partial=partial, ends=ends)

        return await on_each(size, one)

    return attack


def rapid_reset_again_and_again() -> Attack:
    """Return an attack of resets on many connections. Whenever one has made its calls, another takes its place."""

    async def attack(address: Address, size: Size) -> Sent:
        async def one() -> Sent:
            reports = [await reset(address, alone) for _ in range(_NUM_REPLACED)]
            return total(reports)

        alone = replace(size, connections=1, frames=min(size.frames, 1000))
        reset = rapid_reset()
        return await on_each(replace(size, connections=4 * size.connections), one)

    return attack


def _called(connection: RawConnection, call: Call) -> int:
    return connection.call(call.method, call.message)


STREAM_ATTACKS: dict[str, Attack] = {
    "window 0, unary": window_zero(UNARY),
    "window 0, streams": window_zero(STREAM),
    "window 0, many requests": window_zero(MANY),
    "window 0, log-probabilities": fewer(20, window_zero(HEAVY_STREAM)),
    "window 0, many requests with log-probabilities": fewer(30, window_zero(HEAVY_MANY)),
    "window 0, reflection": window_zero(REFLECTION),
    "window by single bytes, unary": window_by_single_bytes(LONG_UNARY),
    "window by single bytes, streams": window_by_single_bytes(STREAM),
    "window by single bytes, log-probabilities": fewer(20, window_by_single_bytes(HEAVY_STREAM)),
    "connection window never grows": connection_window_never_grows,
    "socket never read": socket_never_read,
    "headers only, unary": headers_only(UNARY.method),
    "headers only, streams": headers_only(STREAM.method),
    "headers only, health": headers_only(HEALTH_METHOD),
    "headers only, reflection": headers_only(REFLECTION_METHOD),
    "headers only, unknown method": headers_only(UNKNOWN_METHOD),
    "headers only, unknown service": headers_only(UNKNOWN_SERVICE_METHOD),
    "more streams than allowed": more_streams_than_allowed(acknowledges=True),
    "more streams than allowed, settings not acknowledged": more_streams_than_allowed(acknowledges=False),
    "slow message": slow_message,
    "slow headers": slow_headers,
    "large messages without their end": fewer(4, large_messages_without_their_end),
    "rapid reset": rapid_reset(),
    "rapid reset, again and again": rapid_reset_again_and_again(),
    "rapid reset of whole calls": rapid_reset(UNARY),
    "rapid reset of streams": rapid_reset(STREAM),
    "rapid reset of many requests": rapid_reset(MANY),
}
