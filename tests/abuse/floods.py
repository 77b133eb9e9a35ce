"""Floods of frames that are cheap for their sender."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable

from h2.settings import SettingCodes
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    ExtensionFrame,
    Frame,
    HeadersFrame,
    PingFrame,
    PriorityFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.abuse.attack import Attack, Sent, Size, played
from tests.abuse.calls import UNARY
from tests.abuse.raw_connection import RawConnection

_AT_ONCE = 50
# Time for an answer to the last frames to arrive, if there is one.
_LISTEN_S = 0.2

Make = Callable[[RawConnection], Frame]


def flood(make: Make, *, is_read: bool = True) -> Attack:
    """Return an attack that repeats the frame that `make` returns. is_read: whether the client reads the answers."""

    async def play(connection: RawConnection, size: Size) -> Sent:
        if not is_read:
            connection.stop_reading()
        frames = make(connection).serialize() * _AT_ONCE
        with contextlib.suppress(TimeoutError):  # the server has stopped reading, so the flood has ended
            async with asyncio.timeout(size.hold_s):
                await _pour(connection, frames, size.frames // _AT_ONCE)
        await connection.wait_closed(_LISTEN_S)
        return Sent(partial=Counter({UNARY.method: len(connection.streams)}), ends=Counter([connection.state]))

    return played(play, answers=False)


async def _pour(connection: RawConnection, frames: bytes, num_times: int) -> None:
    for _ in range(num_times):
        if connection.is_closed:
            return
        connection.send_bytes(frames)
        await connection.flush()
        await asyncio.sleep(0)  # lets the reader receive answers


def _continuation(num_bytes: int) -> Make:
    """Return a function that makes CONTINUATION frames of headers without an end. num_bytes: of each header."""

    def make(connection: RawConnection) -> Frame:
        stream_id = connection.next_id()
        connection.send(HeadersFrame(stream_id, connection.header_block(UNARY.method)))
        # A literal without indexing, with a name of one byte; its value fills the rest.
        field = b"" if num_bytes == 0 else b"\x00\x01x\x7f" + _varint(num_bytes - 127) + b"v" * num_bytes
        return ContinuationFrame(stream_id, field)

    return make


def _varint(value: int) -> bytes:
    """Encode the rest of an HPACK integer after a prefix whose bits are all set (RFC 7541, 5.1)."""
    out = bytearray()
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


_WINDOW = {int(SettingCodes.INITIAL_WINDOW_SIZE): 65_535}
FLOODS: dict[str, Attack] = {
    "PING": flood(lambda _: PingFrame(0, b"whatever")),
    "PING, answers not read": flood(lambda _: PingFrame(0, b"whatever"), is_read=False),
    "SETTINGS": flood(lambda _: SettingsFrame(0, _WINDOW)),
    "SETTINGS, answers not read": flood(lambda _: SettingsFrame(0, _WINDOW), is_read=False),
    "PRIORITY": flood(lambda _: PriorityFrame(1, depends_on=0, stream_weight=15)),
    "WINDOW_UPDATE": flood(lambda _: WindowUpdateFrame(0, 1)),
    "CONTINUATION, empty": flood(_continuation(0)),
    "CONTINUATION, 1 KB each": flood(_continuation(1000)),
    "DATA, empty": flood(lambda connection: DataFrame(connection.headers(UNARY.method))),
    "frames of an unknown type": flood(lambda _: ExtensionFrame(0x42, 0, body=b"whatever")),
}
