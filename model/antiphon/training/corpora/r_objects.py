"""Databases of R objects (.rdb, R Internals, section 1.8), of which only character vectors are read."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

_CHARACTER_VECTOR = 16
_HEADER_BYTES = 2 + 3 * 4 + 4 + len("UTF-8")  # format "X\n", three versions, length and name of the encoding


def character_vectors(database: bytes) -> Iterator[list[str]]:
    """Yield the strings of each character vector. Four bytes before each zlib stream have its full length."""
    while database:
        stream = zlib.decompressobj()
        serialised = stream.decompress(database[4:])
        database = stream.unused_data
        kind, count = struct.unpack_from(">II", serialised, _HEADER_BYTES)
        if kind & 0xFF == _CHARACTER_VECTOR:
            yield list(_strings(serialised, count))


def _strings(serialised: bytes, count: int) -> Iterator[str]:
    place = _HEADER_BYTES + 8
    for _ in range(count):
        (length,) = struct.unpack_from(">i", serialised, place + 4)  # -1 for a missing value
        place += 8 + max(0, length)
        yield serialised[place - max(0, length) : place].decode("utf-8")
