"""Files of a Marian directory: tensors of a .npz or .bin by name, the model's options, and the decoder's configuration.

A .npz holds float32 arrays; its array special:model.yml is the text of the options, as bytes. A .bin, version 1, is
little-endian (Marian's src/common/binary.cpp):

    u64 version, u64 count; for each tensor: u64 bytes of its name, u64 type, u64 rank, u64 bytes of its data
    the names, each with a zero byte at the end; the dimensions, i32 each
    u64 padding, as many bytes; the data of each tensor

Types are float32, int8 (the options) and intgemm's int8: its data are the integers, one float32 multiplier, and bytes
up to a multiple of 256. An integer v is the weight v / multiplier. Matrices of products are stored column by column,
embeddings row by row. families/marian_files.py interprets the tensors.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from antiphon.errors import SourceError

OPTIONS = "special:model.yml"
_VERSION = 1
_FLOAT32, _INT8, _INTGEMM8 = 0x404, 0x101, 0x4101
_NAMES = {_FLOAT32: "float32", _INT8: "int8", _INTGEMM8: "intgemm8"}
_LONGEST_NAME, _MOST_TENSORS, _LARGEST_RANK = 1024, 100_000, 8
# Scales of activations and other numbers that only Marian's own products need.
_UNUSED_ENDINGS = ("_QuantMultA",)
_EMBEDDINGS = ("Wemb", "encoder_Wemb", "decoder_Wemb")

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Stored:
    kind: int
    shape: tuple[int, ...]
    offset: int
    size: int


class MarianFile:
    """Tensors of a Marian model file. Raises SourceError naming the file if it is not one or is truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._arrays: dict[str, NDArray[Any]] = {}
        self._stored: dict[str, _Stored] = {}
        if path.suffix == ".npz":
            self._arrays = _read_npz(path)
        else:
            self._read_bin()
        self.options = self._options()

    def __contains__(self, name: str) -> bool:
        return name in self._arrays or name in self._stored

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the model's tensors."""
        names = (*self._arrays, *self._stored)
        yield from (name for name in names if not name.startswith("special:") and not name.endswith(_UNUSED_ENDINGS))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the dimensions of a tensor. Raises SourceError if it is missing."""
        if name in self._arrays:
            return self._arrays[name].shape
        return self._find(name).shape

    def is_quantised(self, name: str) -> bool:
        """Return whether a tensor is stored as integers."""
        return name in self._stored and self._stored[name].kind == _INTGEMM8

    def floats(self, name: str) -> Floats:
        """Return a tensor as float32."""
        if name in self._arrays:
            return self._arrays[name].astype(np.float32)
        stored = self._find(name)
        if stored.kind == _FLOAT32:
            return self._numbers(stored, "<f4").reshape(stored.shape).astype(np.float32)
        values = self._numbers(stored, "<i1").astype(np.float32) / self._multiplier(name, stored)
        if name in _EMBEDDINGS:
            return values.reshape(stored.shape)
        return np.ascontiguousarray(values.reshape(stored.shape[::-1]).T)

    def _multiplier(self, name: str, stored: _Stored) -> np.float32:
        """Return the factor of a tensor's integers, which follows them. Raises SourceError unless it is above 0."""
        at = stored.offset + int(np.prod(stored.shape, dtype=np.int64))
        (factor,) = np.frombuffer(self._bytes, "<f4", 1, at)
        if not (np.isfinite(factor) and factor > 0):
            raise SourceError(f"{self.path}: the multiplier of {name} is {factor}, which must be above 0")
        return np.float32(factor)

    def _numbers(self, stored: _Stored, dtype: str) -> NDArray[Any]:
        return np.frombuffer(self._bytes, dtype, int(np.prod(stored.shape, dtype=np.int64)), stored.offset)

    def _find(self, name: str) -> _Stored:
        try:
            return self._stored[name]
        except KeyError:
            raise SourceError(f"{self.path}: there is no tensor {name}") from None

    def _options(self) -> dict[str, Any]:
        if OPTIONS not in self:
            raise SourceError(f"{self.path} has no {OPTIONS}, the options with which Marian trained the model")
        if OPTIONS in self._arrays:
            content = self._arrays[OPTIONS].tobytes()
        else:
            stored = self._stored[OPTIONS]
            content = self._bytes[stored.offset : stored.offset + stored.size].tobytes()
        try:
            options = yaml.safe_load(content.rstrip(b"\0").decode("utf-8"))
            return dict(options)
        except (yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError) as error:
            raise SourceError(f"{self.path}: {OPTIONS} cannot be read: {error}") from None

    def _read_bin(self) -> None:
        try:
            self._bytes: NDArray[np.uint8] = np.memmap(self.path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise SourceError(f"{self.path} cannot be read: {error}") from None
        self._at = 0
        if (version := self._number()) != _VERSION:
            raise SourceError(
                f"{self.path}: not a Marian model, or of an unsupported version: version is {version}, "
                f"supported is {_VERSION}"
            )
        count = self._limited("tensors", self._number(), _MOST_TENSORS)
        headers = [tuple(self._number() for _ in range(4)) for _ in range(count)]
        names = [self._name(length) for length, *_ in headers]
        shapes = [self._shape(name, rank) for name, (_, _, rank, _) in zip(names, headers, strict=True)]
        self._skip(self._number())
        for name, (_, kind, _, size), shape in zip(names, headers, shapes, strict=True):
            self._stored[name] = _Stored(kind, shape, self._skip(size), size)
            self._check(name)

    def _check(self, name: str) -> None:
        """Raise SourceError if a tensor has another type, or fewer bytes than its dimensions need."""
        stored = self._stored[name]
        if stored.kind not in _NAMES:
            raise SourceError(
                f"{self.path}: {name} has the type {stored.kind:#x}; supported are {', '.join(_NAMES.values())}"
            )
        count = int(np.prod(stored.shape, dtype=np.int64))
        needed = {_FLOAT32: 4 * count, _INT8: count, _INTGEMM8: count + 4}[stored.kind]
        if needed > stored.size:
            raise SourceError(f"{self.path}: {name} {list(stored.shape)} has {stored.size} bytes, expected {needed}")

    def _name(self, length: int) -> str:
        offset = self._skip(self._limited("bytes of a name", length, _LONGEST_NAME))
        return self._bytes[offset : offset + length].tobytes().rstrip(b"\0").decode("utf-8", "replace")

    def _shape(self, name: str, rank: int) -> tuple[int, ...]:
        offset = self._skip(4 * self._limited(f"dimensions of {name}", rank, _LARGEST_RANK))
        shape = tuple(int(number) for number in np.frombuffer(self._bytes, "<i4", rank, offset))
        if min(shape, default=1) < 0:
            raise SourceError(f"{self.path}: {name} has the dimensions {list(shape)}")
        return shape

    def _limited(self, what: str, count: int, most: int) -> int:
        if count > most:
            raise SourceError(f"{self.path} is damaged: number of {what} is {count}; at most {most} are possible")
        return count

    def _number(self) -> int:
        return int(struct.unpack_from("<Q", self._bytes.data, self._skip(8))[0])

    def _skip(self, count: int) -> int:
        """Advance by `count` bytes and return the previous position. Raises SourceError at the end of the file."""
        begin = self._at
        if begin + count > len(self._bytes):
            raise SourceError(f"{self.path} is truncated: {count} bytes from byte {begin} on are missing")
        self._at += count
        return begin


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise SourceError(f"{path} cannot be read: {error}") from None


def is_model_file(path: Path) -> bool:
    """Return whether a file is a .npz with Marian's options, or starts like a Marian .bin."""
    try:
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as archive:
                return f"{OPTIONS}.npy" in archive.namelist()
        with path.open("rb") as stream:
            version, count, name_bytes = struct.unpack("<3Q", stream.read(24))
    except (OSError, struct.error, zipfile.BadZipFile):
        return False
    return bool(version == _VERSION and 0 < count <= _MOST_TENSORS and 0 < name_bytes <= _LONGEST_NAME)
