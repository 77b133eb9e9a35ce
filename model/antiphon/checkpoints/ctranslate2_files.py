"""Files of a CTranslate2 directory: variables of model.bin by name, vocabularies, text format.

Variables are read on demand from the memory-mapped model.bin, which is little-endian. Versions 1 to 6 exist
(CTranslate2's python/ctranslate2/specs/model_spec.py writes the newest); versions 2 to 6 are read:

    u32 version; from version 2 on: string specification, u32 revision
    u32 count, then for each variable: string name, u8 rank, u32 dimensions, type and size, data
        from version 4 on: u8 type (float32, int8, int16, int32, float16, bfloat16), u32 number of bytes
        before:            u8 bytes of an item (4 float32, 2 int16, 1 int8), u32 number of items
    from version 3 on: u32 count, then for each alias: string name, string variable

A string is a u16 length and bytes with a zero byte at the end. families/ctranslate2.py interprets the variables.

A vocabulary is a text file with one token a line, or a JSON list. CTranslate2 adds the unknown token if it is missing
(src/vocabulary.cc). Texts are tokens between spaces, or are segmented by SentencePiece models in the directory.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.settings import Settings
from antiphon.errors import SourceError
from antiphon.text.format import Template, TextFormat

NEWEST_VERSION = 6
_NAMED_SPECIFICATION, _ALIASES, _TYPE_IDS = 2, 3, 4  # first version with each of them
# NumPy has no bfloat16: it is the upper 16 bits of a float32, read as integers.
_TYPES = {"float32": "<f4", "int8": "<i1", "int16": "<i2", "int32": "<i4", "float16": "<f2", "bfloat16": "<u2"}
_TYPES_BY_SIZE = {4: "float32", 2: "int16", 1: "int8"}
_INT16_SCALE = 1000.0  # scale of int16 weights without a scale variable
_LONGEST_SPECIFICATION = 64  # bytes; longer than every existing name
_PIECES = (".spm", ".model")

Floats = NDArray[np.float32]
Tokens = tuple[list[str], list[str]]


@dataclass(frozen=True, slots=True)
class _Stored:
    dtype: str
    shape: tuple[int, ...]
    offset: int


class ModelFile:
    """Variables of a model.bin. Raises SourceError naming the file if it is not a model or is truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise SourceError(f"{path} cannot be read: {error}") from None
        self._at = 0
        self._variables: dict[str, _Stored] = {}
        self._aliases: dict[str, str] = {}
        self._read()

    def __contains__(self, name: str) -> bool:
        return self._target(name) in self._variables

    def __iter__(self) -> Iterator[str]:
        """Yield the names of variables and aliases."""
        yield from self._variables
        yield from self._aliases

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the dimensions of a variable; () for a scalar. Raises SourceError if it is missing."""
        return self._stored(name).shape

    def dtype(self, name: str) -> str:
        """Return the stored type: float32, int8, int16, int32, float16 or bfloat16."""
        return self._stored(name).dtype

    def array(self, name: str) -> NDArray[Any]:
        """Return a view of the stored variable; bfloat16 as uint16 with the same bits."""
        stored = self._stored(name)
        count = int(np.prod(stored.shape, dtype=np.int64))
        return np.frombuffer(self._bytes, _TYPES[stored.dtype], count, stored.offset).reshape(stored.shape)

    def floats(self, name: str) -> Floats:
        """Return the variable as float32; integers are divided by their scale, one for each row or one for all."""
        stored, values = self._stored(name), self.array(name)
        if stored.dtype in ("int8", "int16") and stored.shape:
            return self._dequantized(name, values)
        if stored.dtype == "bfloat16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32)

    def scalar(self, name: str, default: float) -> float:
        """Return a flag, number or enum of the specification; `default` if the file does not have it."""
        return self.floats(name).item() if name in self else default

    def is_same(self, first: str, second: str) -> bool:
        """Return whether two variables have the same values: one is an alias of the other, or they are equal."""
        if self._target(first) == self._target(second):
            return True
        if self.shape(first) != self.shape(second) or self.dtype(first) != self.dtype(second):
            return False
        return np.array_equal(self.array(first), self.array(second)) and np.array_equal(
            self.floats(first), self.floats(second)
        )

    def text(self, name: str, default: str) -> str:
        """Return a string of the specification, which is stored as bytes; `default` if the file does not have it."""
        return self.array(name).tobytes().decode("utf-8", "replace") if name in self else default

    def _dequantized(self, name: str, integers: NDArray[Any]) -> Floats:
        scale_name = f"{name}_scale" if f"{name}_scale" in self else f"{self._target(name)}_scale"
        if scale_name in self:
            scale = self.array(scale_name).astype(np.float32)
        elif integers.dtype == np.int16:
            scale = np.array(_INT16_SCALE, np.float32)
        else:
            raise SourceError(f"{self.path}: {name} is int8, but there is no {name}_scale")
        by_row = scale.reshape((-1,) + (1,) * (integers.ndim - 1)) if scale.ndim else scale
        if scale.ndim and len(by_row) != len(integers):
            raise SourceError(f"{self.path}: {scale_name} has {len(by_row)} scales, expected {len(integers)}")
        return integers.astype(np.float32) / by_row

    def _target(self, name: str) -> str:
        return self._aliases.get(name, name)

    def _stored(self, name: str) -> _Stored:
        try:
            return self._variables[self._target(name)]
        except KeyError:
            raise SourceError(f"{self.path}: there is no variable {name}") from None

    def _read(self) -> None:
        self.version = self._number("<I")
        if not _NAMED_SPECIFICATION <= self.version <= NEWEST_VERSION:
            raise SourceError(
                f"{self.path}: not a CTranslate2 model, or of an unsupported version: version is {self.version}, "
                f"supported are {_NAMED_SPECIFICATION} to {NEWEST_VERSION}"
            )
        has_specification = self.version >= _NAMED_SPECIFICATION
        self.specification = self._string() if has_specification else ""
        self.revision = self._number("<I") if has_specification else 1
        for _ in range(self._number("<I")):
            name = self._string()
            self._variables[name] = self._variable(name)
        for _ in range(self._number("<I") if self.version >= _ALIASES else 0):
            alias = self._string()
            self._aliases[alias] = self._string()

    def _variable(self, name: str) -> _Stored:
        shape = tuple(self._number("<I") for _ in range(self._number("<B")))
        code = self._number("<B")
        names = list(_TYPES)
        if self.version >= _TYPE_IDS:
            dtype = names[code] if code < len(names) else None
            size = self._number("<I")
        else:
            dtype = _TYPES_BY_SIZE.get(code)
            size = self._number("<I") * code
        if dtype is None:
            raise SourceError(f"{self.path}: {name} has the unknown type {code}")
        expected = int(np.prod(shape, dtype=np.int64)) * np.dtype(_TYPES[dtype]).itemsize
        if size != expected:
            raise SourceError(f"{self.path}: {name} {list(shape)} has {size} bytes, expected {expected}")
        return _Stored(dtype, shape, self._skip(size))

    def _number(self, layout: str) -> int:
        offset = self._skip(struct.calcsize(layout))
        return int(struct.unpack_from(layout, self._bytes.data, offset)[0])

    def _string(self) -> str:
        length = self._number("<H")
        offset = self._skip(length)
        return self._bytes[offset : offset + length].tobytes().rstrip(b"\0").decode("utf-8", "replace")

    def _skip(self, count: int) -> int:
        """Advance by `count` bytes and return the previous position. Raises SourceError at the end of the file."""
        begin = self._at
        if begin + count > len(self._bytes):
            raise SourceError(f"{self.path} is truncated: {count} bytes from byte {begin} on are missing")
        self._at += count
        return begin


def is_model_file(path: Path) -> bool:
    """Return whether a file starts like a CTranslate2 model with a named specification (version 2 and later)."""
    try:
        with path.open("rb") as stream:
            head = stream.read(struct.calcsize("<IH") + _LONGEST_SPECIFICATION)
        version, length = struct.unpack_from("<IH", head)
    except (OSError, struct.error):
        return False
    name = head[6 : 6 + length]
    known = _NAMED_SPECIFICATION <= version <= 255 and 1 < length <= _LONGEST_SPECIFICATION
    return known and name[-1:] == b"\0" and name.rstrip(b"\0").isalnum()


def is_shared(folder: Path) -> bool:
    """Return whether sources and targets share one vocabulary."""
    return _path(folder, "shared_vocabulary") is not None


def read_vocabularies(folder: Path, settings: Settings, *, adds_begin: bool) -> Tokens:
    """Return source and target tokens; the same list if they share it.

    adds_begin: the decoder starts with a zero vector instead of a begin token, so a token that no text contains is
        added for it.
    Raises SourceError naming the missing or damaged file.
    """
    unknown = settings["unk_token"]
    if (shared := _read(folder, "shared_vocabulary", unknown)) is not None:
        source = target = shared
    else:
        sides = [_read(folder, f"{side}_vocabulary", unknown) for side in ("source", "target")]
        if sides[0] is None or sides[1] is None:
            raise SourceError(
                f"{folder} has no shared_vocabulary, nor source_vocabulary and target_vocabulary (.json or .txt)"
            )
        source, target = sides[0], sides[1]
    if adds_begin:
        begin = next(name for name in ("<start>", "<zeros>", "<begin>") if name not in target)
        target = [*target, begin]
        source = target if shared is not None else source
    return source, target


def text(folder: Path, settings: Settings, config: ModelConfig) -> TextFormat:
    """Return the text format: SentencePiece if the directory has models, otherwise tokens between spaces."""
    source, target = settings["tokens"]
    names = _written(settings, "json" if (pieces := _pieces(folder)) else "txt")
    common: dict[str, Any] = dict(
        special_ids=tuple(sorted({config.pad_id, config.bos_id, config.eos_id})),
        template=_template(source, settings),
    )
    if pieces:
        common |= dict(source_vocabulary=names[0], target_vocabulary=names[-1])
        return TextFormat(kind="sentencepiece", source=pieces[0], target=pieces[-1], **common)
    for token in (*source, *target):
        if "\n" in token:
            raise SourceError(
                f"{folder}: the token {token!r} has a line break, so it cannot be in a list of one a line"
            )
    return TextFormat(kind="words", source=names[0], target=names[-1], **common)


def write_text(folder: Path, settings: Settings, to: Path) -> None:
    """Write the vocabularies for TextFormat: one token a line, or JSON from piece to id for SentencePiece models."""
    is_json = bool(_pieces(folder))
    names = _written(settings, "json" if is_json else "txt")
    for name, tokens in zip(names, settings["tokens"], strict=False):
        ids = {token: index for index, token in reversed(list(enumerate(tokens)))}
        content = json.dumps(ids, ensure_ascii=False) if is_json else "".join(f"{token}\n" for token in tokens)
        (to / name).write_text(content, encoding="utf-8", newline="\n")


def _written(settings: Settings, suffix: str) -> list[str]:
    source, target = settings["tokens"]
    sides = ("shared",) if source is target else ("source", "target")
    return [f"{side}_vocabulary.{suffix}" for side in sides]


def _template(source: Sequence[str], settings: Settings) -> Template:
    ids = {token: index for index, token in reversed(list(enumerate(source)))}
    around: list[Template] = []
    for flag, token in (("add_source_bos", settings["bos_token"]), ("add_source_eos", settings["eos_token"])):
        if settings[flag] and token not in ids:
            raise SourceError(f"{flag} is set, but the source vocabulary has no {token}")
        around.append((ids[token],) if settings[flag] else ())
    return (*around[0], "$text", *around[1])


def _pieces(folder: Path) -> list[str]:
    """Return the SentencePiece models of the directory: one for both sides, or source and target, or none."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in _PIECES)
    if len(names) <= 1 or (len(names) == 2 and names[0].startswith("source") and names[1].startswith("target")):
        return names
    raise SourceError(
        f"{folder} has several SentencePiece models: {', '.join(names)}; keep one for both sides, or source and target"
    )


def _path(folder: Path, stem: str) -> Path | None:
    return next((path for path in (folder / f"{stem}.json", folder / f"{stem}.txt") if path.is_file()), None)


def _read(folder: Path, stem: str, unknown: str) -> list[str] | None:
    path = _path(folder, stem)
    if path is None:
        return None
    try:
        content = path.read_bytes().decode("utf-8")
        tokens = json.loads(content) if path.suffix == ".json" else _lines(content)
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from None
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise SourceError(f"{path} is not a list of tokens")
    return tokens if unknown in tokens else [*tokens, unknown]


def _lines(content: str) -> list[str]:
    """Return the lines of a text; if all lines end with a carriage return, it is removed."""
    lines = content.removesuffix("\n").split("\n")
    return [line[:-1] for line in lines] if all(line.endswith("\r") for line in lines) else lines
