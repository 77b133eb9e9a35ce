"""One HTTP/2 connection to a gRPC server, of which a test controls every frame. Knows only frames and gRPC's framing.

It checks neither windows nor the number of streams nor the order of frames. A gRPC library, and the connection class
of h2, would refuse to send most frames of the attacks.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import grpc
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hpack import Decoder, Encoder, NeverIndexedHeaderTuple
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DEFAULT_WINDOW = 65_535
MAX_WINDOW = 2**31 - 1
MAX_FRAME_BYTES = 16_384
FRAME_HEADER_BYTES = 9
CONNECT_TIMEOUT_S = 30
OPEN, CLOSED = "open", "closed"
"""Ends of streams beside statuses and resets: none yet, and the end of the connection."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Address of a server, and of the client's end.

    tls: None is plaintext. source: a separate loopback address of the attacker, because the server treats all clients
    of one address as one caller and gives each caller its fair share. receive_buffer_bytes: of the socket; None leaves
    its size to the kernel, which uses megabytes for a client that does not read.
    """

    port: int
    tls: ssl.SSLContext | None = None
    source: str = "127.0.0.66"
    host: str = "127.0.0.1"
    receive_buffer_bytes: int | None = None

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection, TLS handshake included. Raises OSError (of which ssl.SSLError is one)."""
        connected = socket.socket()
        try:
            connected.setblocking(False)
            connected.bind((self.source, 0))
            if self.receive_buffer_bytes is not None:
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.receive_buffer_bytes)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().sock_connect(connected, (self.host, self.port))
                name = None if self.tls is None else "localhost"
                return await asyncio.open_connection(sock=connected, ssl=self.tls, server_hostname=name)
        except BaseException:
            connected.close()
            raise


@dataclass(slots=True)
class Stream:
    """Frames of a server on one stream. end: name of a status, "reset NAME", "closed" or "open"."""

    headers: dict[str, str] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    trailers: dict[str, str] = field(default_factory=dict)
    end: str = OPEN


class RawConnection:
    """Sends exactly the given frames. A separate task reads and stores the server's frames."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, gives_credit: bool, answers: bool
    ) -> None:
        self._scheme = "http" if writer.get_extra_info("ssl_object") is None else "https"
        self._reader, self._writer = reader, writer
        self._gives_credit, self._answers = gives_credit, answers
        self._decoder = Decoder()
        self._blocks: dict[tuple[tuple[str, str], ...], bytes] = {}
        self._last_id = -1
        self._partial: HeadersFrame | None = None
        self._num_open = 0
        self._changed = asyncio.Event()
        self._windows: dict[int, int] = {0: DEFAULT_WINDOW}
        self._stream_window = DEFAULT_WINDOW
        self.streams: dict[int, Stream] = {}
        self.goaway: str | None = None
        self.is_closed = False
        self._has_settings = False
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def open(
        cls,
        address: Address,
        settings: Mapping[SettingCodes, int] | None = None,
        *,
        gives_credit: bool = True,
        answers: bool = True,
    ) -> Self:
        """Connect, and send preface and settings. Raises OSError.

        gives_credit: the windows grow by the received bytes. answers: SETTINGS and PING are acknowledged.
        """
        connection = cls(*await address.connect(), gives_credit=gives_credit, answers=answers)
        given = {int(name): value for name, value in (settings or {}).items()}
        connection.send_bytes(PREFACE)
        connection.send(SettingsFrame(0, given))
        return connection

    def headers(
        self, method: str, *, metadata: tuple[tuple[str, str], ...] = (), is_end: bool = False, timeout: str = ""
    ) -> int:
        """Open a stream with the headers of a call; return its id. method: package.Service/Method."""
        stream_id = self.next_id()
        block = self.header_block(method, metadata=metadata, timeout=timeout)
        flags = ("END_HEADERS", "END_STREAM") if is_end else ("END_HEADERS",)
        self.send(HeadersFrame(stream_id, block, flags=flags))
        return stream_id

    def call(self, method: str, message: bytes, *, metadata: tuple[tuple[str, str], ...] = ()) -> int:
        """Send a whole call with one small message, and end the client's side. Return the stream's id."""
        stream_id = self.headers(method, metadata=metadata)
        self.data(stream_id, framed(message), is_end=True)
        return stream_id

    def next_id(self) -> int:
        """Return the id of the next stream, and expect the server to end that stream."""
        self._last_id += 2
        self.streams[self._last_id] = Stream()
        self._num_open += 1
        return self._last_id

    def header_block(self, method: str, *, metadata: tuple[tuple[str, str], ...] = (), timeout: str = "") -> bytes:
        """Return the headers of a call in HPACK, always the same bytes, because the dynamic table stays empty."""
        pairs = (
            (":method", "POST"), (":scheme", self._scheme), (":path", f"/{method}"), (":authority", "localhost"),
            ("te", "trailers"), ("content-type", "application/grpc"),
            *((("grpc-timeout", timeout),) if timeout else ()), *metadata,
        )  # fmt: skip
        if pairs not in self._blocks:
            self._blocks[pairs] = Encoder().encode([NeverIndexedHeaderTuple(*pair) for pair in pairs], huffman=False)
        return self._blocks[pairs]

    def data(self, stream_id: int, data: bytes, *, is_end: bool = False) -> None:
        """Send one DATA frame, regardless of the windows."""
        self.send(DataFrame(stream_id, data, flags=("END_STREAM",) if is_end else ()))

    async def body(self, stream_id: int, data: bytes, *, is_end: bool = True) -> None:
        """Send a body in DATA frames as the server's windows allow; stop if the stream ends before."""
        if not data and is_end:
            self.data(stream_id, b"", is_end=True)
        sent = 0
        while sent < len(data) and self._is_open(stream_id):
            room = min(self._windows[0], self._windows.setdefault(stream_id, self._stream_window), MAX_FRAME_BYTES)
            if room <= 0:
                await self._change()
                continue
            part = data[sent : sent + room]
            sent += len(part)
            self._windows[0] -= len(part)
            self._windows[stream_id] -= len(part)
            self.data(stream_id, part, is_end=is_end and sent == len(data))
            await self.flush()

    def reset(self, stream_id: int) -> None:
        """Cancel a stream and stop waiting for its end."""
        self.send(RstStreamFrame(stream_id, int(ErrorCodes.CANCEL)))
        self._end(stream_id, "reset by us")

    def grant(self, num_bytes: int, stream_id: int = 0) -> None:
        """Enlarge the server's window of a stream, or of the connection (0)."""
        self.send(WindowUpdateFrame(stream_id, num_bytes))

    def send(self, frame: Frame) -> None:
        self.send_bytes(frame.serialize())

    def send_bytes(self, data: bytes) -> None:
        """Send bytes unchanged, or nothing if the connection is closed."""
        if not self.is_closed:
            self._writer.write(data)

    async def flush(self) -> None:
        """Wait until the kernel has taken nearly everything, or the connection has ended."""
        with contextlib.suppress(OSError):
            await self._writer.drain()

    def stop_reading(self) -> None:
        """Stop reading, so that the server's data stay in the kernel's buffers."""
        self._reading.cancel()

    async def greeted(self) -> None:
        """Wait for the server's settings, which are acknowledged before any later frame.

        A gRPC server enforces its settings after their acknowledgement.
        """
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            while not self._has_settings and not self.is_closed:
                await self._change()

    async def ends(self, timeout_s: float) -> Counter[str]:
        """Count the streams by their end; "open" if they have not ended at the time limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._num_open and not self._reading.done():
                    await self._change()
        return Counter(stream.end for stream in self.streams.values())

    async def wait_closed(self, timeout_s: float) -> bool:
        """Wait for the server to close the connection; return False if it has not at the time limit."""
        done, _ = await asyncio.wait({self._reading}, timeout=timeout_s)
        return bool(done)

    @property
    def state(self) -> str:
        """`connection` with the reason of a GOAWAY, `closed` or `stands`."""
        return f"connection {self.goaway or ('closed' if self.is_closed else 'stands')}"

    async def close(self) -> None:
        """Close the connection at once, also during calls."""
        self._reading.cancel()
        await asyncio.wait({self._reading})
        self._writer.transport.abort()
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _read(self) -> None:
        buffer = bytearray()
        with contextlib.suppress(OSError):
            while data := await self._reader.read(65_536):
                buffer += data
                for frame in _frames(buffer):
                    self._receive(frame)
                self._changed.set()
        self._close()

    def _receive(self, frame: Frame) -> None:
        match frame:
            case HeadersFrame() | ContinuationFrame():
                self._receive_headers(frame)
            case DataFrame():
                self._receive_data(frame)
            case RstStreamFrame():
                self._end(frame.stream_id, f"reset {_name_of(frame.error_code)}")
            case SettingsFrame() if "ACK" not in frame.flags:
                self._receive_settings(frame)
            case PingFrame() if "ACK" not in frame.flags and self._answers:
                self.send(PingFrame(0, frame.opaque_data, flags=("ACK",)))
            case WindowUpdateFrame():
                window = self._windows.get(frame.stream_id, self._stream_window)
                self._windows[frame.stream_id] = window + frame.window_increment
            case GoAwayFrame():
                self.goaway = _name_of(frame.error_code)

    def _receive_headers(self, frame: HeadersFrame | ContinuationFrame) -> None:
        if isinstance(frame, HeadersFrame):
            self._partial = frame
        elif self._partial is not None:
            self._partial.data += frame.data
        if self._partial is None or "END_HEADERS" not in frame.flags:
            return
        opening, self._partial = self._partial, None
        pairs = {_text(name): _text(value) for name, value in self._decoder.decode(opening.data)}
        stream = self.streams.setdefault(opening.stream_id, Stream())
        if "END_STREAM" not in opening.flags:
            stream.headers = pairs
            return
        stream.trailers = pairs
        self._end(opening.stream_id, _status_of(pairs))

    def _receive_data(self, frame: DataFrame) -> None:
        stream = self.streams.setdefault(frame.stream_id, Stream())
        stream.data += frame.data
        if self._gives_credit and frame.flow_controlled_length:
            self.grant(frame.flow_controlled_length)
            self.grant(frame.flow_controlled_length, frame.stream_id)
        if "END_STREAM" in frame.flags:
            self._end(frame.stream_id, "END_STREAM without trailers")

    def _receive_settings(self, frame: SettingsFrame) -> None:
        window = frame.settings.get(int(SettingCodes.INITIAL_WINDOW_SIZE))
        if window is not None:
            for stream_id in self._windows.keys() - {0}:
                self._windows[stream_id] += window - self._stream_window
            self._stream_window = window
        if self._answers:
            self.send(SettingsFrame(0, flags=("ACK",)))
        self._has_settings = True

    def _is_open(self, stream_id: int) -> bool:
        return not self.is_closed and self.streams[stream_id].end == OPEN

    def _end(self, stream_id: int, end: str) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None and stream.end == OPEN:
            stream.end = end
            self._num_open -= 1

    def _close(self) -> None:
        self.is_closed = True
        for stream_id in self.streams:
            self._end(stream_id, CLOSED)
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def framed(message: bytes, *, is_compressed: bool = False, length: int | None = None) -> bytes:
    """Return a message after gRPC's prefix. length: a wrong length for the prefix."""
    return struct.pack(">BI", is_compressed, len(message) if length is None else length) + message


def _frames(buffer: bytearray) -> Iterator[Frame]:
    """Remove the complete frames from a buffer and return them."""
    while len(buffer) >= FRAME_HEADER_BYTES:
        frame, length = Frame.parse_frame_header(memoryview(bytes(buffer[:FRAME_HEADER_BYTES])))
        end = FRAME_HEADER_BYTES + length
        if len(buffer) < end:
            return
        frame.parse_body(memoryview(bytes(buffer[FRAME_HEADER_BYTES:end])))
        del buffer[:end]
        yield frame


def _status_of(trailers: Mapping[str, str]) -> str:
    if "grpc-status" not in trailers:
        return f"HTTP {trailers.get(':status')}"
    value = int(trailers["grpc-status"])
    return next((code.name for code in grpc.StatusCode if code.value[0] == value), f"status {value}")


def _name_of(error_code: int) -> str:
    return ErrorCodes(error_code).name if error_code in set(ErrorCodes) else str(error_code)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
