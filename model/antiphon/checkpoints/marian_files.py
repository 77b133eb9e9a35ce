"""Files of a Marian model: tensors of a .npz or .bin by name, and the options of its training.

A .npz holds arrays of floats; its array special:model.yml is the text of the options, as bytes. A .bin, version 1, is
little-endian (Marian's src/common/binary.cpp):

    u64 version, u64 count; for each tensor: u64 bytes of its name, u64 type, u64 rank, u64 bytes of its data
    the names, each with a zero byte at the end; the dimensions, i32 each
    u64 padding, as many bytes; the data of each tensor

Types are float32, float16, int8 (the options) and intgemm's int8: its data are the integers, one float32 multiplier,
and bytes up to a multiple of 256. An integer v is the weight v / multiplier. Matrices of products are stored column by
column, embeddings row by row. A file can be compressed with gzip, as Mozilla stores it.

marian_folder.py reads the other files of a model's directory; families/marian_files.py interprets the tensors.
"""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml
from numpy.typing import NDArray

from antiphon.errors import SourceError

OPTIONS = "special:model.yml"
SUFFIXES = (".npz", ".bin", ".bin.gz")
_VERSION = 1
_FLOAT32, _FLOAT16, _INT8, _INTGEMM8 = 0x404, 0x402, 0x101, 0x4101
_TYPES = {_FLOAT32: "float32", _FLOAT16: "float16", _INT8: "int8", _INTGEMM8: "intgemm8"}
_LONGEST_NAME, _MOST_TENSORS, _LARGEST_RANK = 1024, 100_000, 8
_MOST_UNPACKED = 8 << 30  # bytes of a file after gzip
# Scales of activations, which only Marian's own products need.
_UNUSED_ENDING = "_QuantMultA"
_EMBEDDINGS = ("Wemb", "encoder_Wemb", "decoder_Wemb")
# Errors of zipfile, zlib and NumPy for a damaged .npz; RuntimeError for an encrypted one.
_DAMAGED = (OSError, ValueError, EOFError, RuntimeError, MemoryError, struct.error, zlib.error, zipfile.BadZipFile)

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Tensor:
    """Dimensions of a tensor, and the function that reads it: as float32, or as bytes for text."""

    shape: tuple[int, ...]
    read: Callable[[], NDArray[Any]]


class MarianFile:
    """Tensors of a Marian model file. Raises SourceError naming the file if it is not one or is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors = _read_npz(path) if path.suffix == ".npz" else _Bin(path).tensors
        self.options = self._options()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the model's tensors."""
        yield from (name for name in self._tensors if not name.startswith("special:") and _UNUSED_ENDING not in name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the dimensions of a tensor. Raises SourceError if it is missing."""
        return self._find(name).shape

    def floats(self, name: str) -> Floats:
        """Return a tensor as float32. Raises SourceError if it is missing or damaged."""
        return np.array(self._find(name).read(), np.float32)

    def _find(self, name: str) -> _Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise SourceError(f"{self.path}: there is no tensor {name}") from None

    def _options(self) -> dict[str, Any]:
        if OPTIONS not in self:
            raise SourceError(f"{self.path} has no {OPTIONS}, the options with which Marian trained the model")
        content = self._find(OPTIONS).read().tobytes()
        try:
            options = yaml.safe_load(content.rstrip(b"\0").decode("utf-8"))
            return dict(options)
        except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
            raise SourceError(f"{self.path}: {OPTIONS} cannot be read: {error}") from None


def open_file(path: Path) -> IO[bytes]:
    """Open a file for reading, through gzip if its name ends with .gz. Raises OSError."""
    if path.suffix == ".gz":
        return gzip.GzipFile(path)  # type: ignore[return-value]
    return path.open("rb")


def read_file(path: Path) -> bytes:
    """Return the content of a file, unpacked if its name ends with .gz. Raises SourceError naming the file."""
    try:
        with open_file(path) as stream:
            content = stream.read(_MOST_UNPACKED + 1)
    except (OSError, EOFError, zlib.error, MemoryError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from None
    if len(content) > _MOST_UNPACKED:
        raise SourceError(f"{path} is larger than {_MOST_UNPACKED >> 30} GiB when it is unpacked")
    return content


def is_model_file(path: Path) -> bool:
    """Return whether a file is a .npz with Marian's options, or starts like a Marian .bin."""
    try:
        if path.suffix == ".npz":
            with zipfile.ZipFile(path) as archive:
                return f"{OPTIONS}.npy" in archive.namelist()
        with open_file(path) as stream:
            version, count, name_bytes = struct.unpack("<3Q", stream.read(24))
    except (OSError, EOFError, struct.error, zlib.error, zipfile.BadZipFile):
        return False
    return bool(version == _VERSION and 0 < count <= _MOST_TENSORS and 0 < name_bytes <= _LONGEST_NAME)


def _read_npz(path: Path) -> dict[str, _Tensor]:
    """Return the arrays of a .npz; only their dimensions are read here."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
            return {
                entry.filename.removesuffix(".npy"): _Tensor(
                    _checked_shape(path, archive, entry), partial(_read_array, path, entry.filename)
                )
                for entry in entries
            }
    except _DAMAGED as error:
        raise SourceError(f"{path} cannot be read: {error}") from None


def _checked_shape(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> tuple[int, ...]:
    """Return the dimensions of an array. Raises SourceError if it is no array of numbers or has another size."""
    with archive.open(entry) as stream:
        version = np.lib.format.read_magic(stream)
        header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = header(stream)
        size = stream.tell() + math.prod(shape) * dtype.itemsize
    if dtype.kind not in "fiuS":
        raise SourceError(f"{path}: {entry.filename} has the type {dtype}; it must be an array of numbers")
    if size != entry.file_size:
        raise SourceError(f"{path}: {entry.filename} has {entry.file_size} bytes, expected {size} for {list(shape)}")
    return tuple(shape)


def _read_array(path: Path, name: str) -> NDArray[Any]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(name) as stream:
            array: NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)
            return array
    except _DAMAGED as error:
        raise SourceError(f"{path}: {name} cannot be read: {error}") from None


class _Bin:
    """Tensors of a .bin file, in memory that maps the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, _Tensor] = {}
        self._at = 0
        self._bytes = self._map()
        if (version := self._number()) != _VERSION:
            raise SourceError(
                f"{path}: not a Marian model, or of an unsupported version: version is {version}, "
                f"supported is {_VERSION}"
            )
        count = self._limited("tensors", self._number(), _MOST_TENSORS)
        headers = [tuple(self._number() for _ in range(4)) for _ in range(count)]
        names = [self._name(length) for length, *_ in headers]
        shapes = [self._shape(name, rank) for name, (_, _, rank, _) in zip(names, headers, strict=True)]
        self._skip(self._number())
        for name, (_, kind, _, size), shape in zip(names, headers, shapes, strict=True):
            self._check(name, kind, shape, size)
            self.tensors[name] = _Tensor(shape, partial(self._read, name, kind, shape, self._skip(size)))

    def _map(self) -> NDArray[np.uint8]:
        if self.path.suffix == ".gz":
            return np.frombuffer(read_file(self.path), np.uint8)
        try:
            return np.memmap(self.path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise SourceError(f"{self.path} cannot be read: {error}") from None

    def _read(self, name: str, kind: int, shape: tuple[int, ...], offset: int) -> NDArray[Any]:
        count = math.prod(shape)
        if kind != _INTGEMM8:
            layout = {_FLOAT32: "<f4", _FLOAT16: "<f2", _INT8: "<i1"}[kind]
            return np.frombuffer(self._bytes, layout, count, offset).reshape(shape)
        (factor,) = np.frombuffer(self._bytes, "<f4", 1, offset + count)
        if not (np.isfinite(factor) and factor > 0):
            raise SourceError(f"{self.path}: the multiplier of {name} is {factor}; it must be above 0")
        values: Floats = np.frombuffer(self._bytes, "<i1", count, offset).astype(np.float32) / factor
        if name in _EMBEDDINGS:
            return values.reshape(shape)
        return np.ascontiguousarray(values.reshape(shape[::-1]).T)

    def _check(self, name: str, kind: int, shape: tuple[int, ...], size: int) -> None:
        """Raise SourceError if a tensor has another type, or fewer bytes than its dimensions need."""
        if kind not in _TYPES:
            raise SourceError(f"{self.path}: {name} has the type {kind:#x}; supported are {', '.join(_TYPES.values())}")
        count = math.prod(shape)
        needed = {_FLOAT32: 4 * count, _FLOAT16: 2 * count, _INT8: count, _INTGEMM8: count + 4}[kind]
        if needed > size:
            raise SourceError(f"{self.path}: {name} {list(shape)} has {size} bytes, expected {needed}")

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
