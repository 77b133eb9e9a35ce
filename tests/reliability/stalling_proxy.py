"""TCP proxy that can go silent without closing a connection, which is then half-open for both ends."""

import socket
import threading
from types import TracebackType
from typing import Self


class StallingProxy:
    """Forwards connections to a port of loopback until `stall` is called. Then it neither reads nor closes them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_stalled = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def stall(self) -> None:
        self._is_stalled.set()

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for one in (self._listener, *self._sockets):
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            server = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if self._is_stalled.is_set():
                    return
                sink.sendall(data)
        except OSError:  # closed by another thread
            return
