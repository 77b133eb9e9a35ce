"""Closes the connection of a client. gRPC's Python server has no method for that."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from urllib.parse import unquote

_OWN_FILES = Path("/proc/self/fd")
# gRPC uses IPv6 sockets for IPv4 clients too, but reports such peers by their IPv4 address.
_MAPPED = "::ffff:"


def disconnect(peer: str) -> bool:
    """Close the connection to `peer`, an address as `ServicerContext.peer` returns it. Blocks.

    Returns False if there is no such connection, or if the system does not list open files. A descriptor is duplicated
    before it is inspected: its number may belong to another connection a moment later, the duplicate's cannot.
    """
    wanted = _address_of(peer)
    if wanted is None or not _OWN_FILES.is_dir():
        return False
    return any(_shut_down(entry, wanted) for entry in _OWN_FILES.iterdir())


def _address_of(peer: str) -> tuple[str, int] | None:
    """Return host and port of `ipv4:127.0.0.1:4242` or `ipv6:%5B::1%5D:4242`; None for other kinds of address."""
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return host.strip("[]"), int(port)


def _shut_down(entry: Path, wanted: tuple[str, int]) -> bool:
    """Close the connection of an open file if it is the wanted one. Return whether it was."""
    with contextlib.suppress(OSError):
        if not str(entry.readlink()).startswith("socket:"):
            return False
        with socket.socket(fileno=os.dup(int(entry.name))) as duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                host, port = duplicate.getpeername()[:2]
                if (host.removeprefix(_MAPPED), port) == wanted:
                    duplicate.shutdown(socket.SHUT_RDWR)
                    return True
    return False
