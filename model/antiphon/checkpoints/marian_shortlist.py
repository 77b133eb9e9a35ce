"""Lexical shortlist of a Marian model, as a shortlist of a bundle (text/shortlist.py).

Marian's binary form, little-endian (its src/data/shortlist.h):

    u64 magic, u64 checksum, u64 frequent tokens, u64 most likely tokens of a source token, u64 O, u64 N
    u64 [O], offsets of source tokens and the end of the last one; u32 [N], their target tokens

The text form has a line for each pair: target token, source token, probability. Both can be compressed with gzip.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.marian_files import read_file
from antiphon.errors import BundleError, SourceError
from antiphon.text.shortlist import Shortlist

_MAGIC = 0xF11A48D5013417F5
_HEADER = struct.Struct("<6Q")
# Marian's defaults for the text form: frequent tokens, likely tokens of a source token, probability to be above.
_FREQUENT, _BEST, _THRESHOLD = 100, 100, 0.0
# Tokens of word aligners for no word.
_NO_WORD = "NULL"


def shortlist_settings(folder: Path, decoder: Mapping[str, Any]) -> list[Any] | None:
    """Return the path of a directory's shortlist and Marian's settings of it; None without one.

    The decoder's file names it, else it is the only file lex.*.bin. A named file that is missing is left out, because
    a model translates without it.
    """
    named = decoder.get("shortlist") or []
    name, *values = named if isinstance(named, list) and named else [named]
    if name:
        path = folder / Path(str(name)).name
        found = [path for path in (path, path.with_name(f"{path.name}.gz")) if path.is_file()][:1]
    else:
        found = [path for path in folder.glob("lex.*") if path.name.removesuffix(".gz").endswith(".bin")]
    return [str(found[0]), *values] if len(found) == 1 else None


def read_shortlist(settings: Sequence[Any], tokens: Sequence[Mapping[str, int]], config: ModelConfig) -> Shortlist:
    """Return the shortlist of a model. Raises SourceError naming the file.

    settings: of `shortlist_settings`. tokens: the id of each token, of both sides or of source and target. As in Marian
    the tokens of a source are candidates too if both sides have one vocabulary.
    """
    path = Path(settings[0])
    content = read_file(path)
    if content[:8] == struct.pack("<Q", _MAGIC):
        num_frequent, offsets, target_ids = _binary(path, content)
    elif path.name.removesuffix(".gz").endswith(".bin"):
        raise SourceError(f"{path} is not a binary shortlist of Marian: it must begin with {_MAGIC:#x}")
    else:
        num_frequent, offsets, target_ids = _lines(path, content, settings[1:], tokens)
    num_sources = config.resolved_source_vocab_size
    if len(offsets) <= num_sources:  # rows without tokens
        offsets = np.pad(offsets, (0, num_sources + 1 - len(offsets)), mode="edge")
    shortlist = Shortlist(
        always=np.unique([*range(min(num_frequent, config.vocab_size)), config.eos_id]).astype(np.int32),
        offsets=offsets.astype(np.int32),
        target_ids=target_ids.astype(np.int32),
        has_source_ids=len(tokens) == 1,
    )
    try:
        shortlist.check(path, num_sources=num_sources, num_targets=config.vocab_size)
    except BundleError as error:
        raise SourceError(str(error)) from None
    return shortlist


def _binary(path: Path, content: bytes) -> tuple[int, Any, Any]:
    """Return the number of frequent tokens, offsets and target ids of the binary form."""
    if len(content) < _HEADER.size:
        raise SourceError(f"{path} is truncated: {len(content)} bytes")
    _, checksum, num_frequent, _, num_offsets, num_ids = _HEADER.unpack_from(content)
    expected = _HEADER.size + 8 * num_offsets + 4 * num_ids
    if num_offsets < 1 or len(content) != expected:
        raise SourceError(f"{path} is damaged: {len(content)} bytes, its header says {expected}")
    if _checksum(content[16:]) != checksum:
        raise SourceError(f"{path} is damaged: its checksum does not match")
    offsets = np.frombuffer(content, "<u8", num_offsets, _HEADER.size)
    target_ids = np.frombuffer(content, "<u4", num_ids, _HEADER.size + 8 * num_offsets)
    if offsets.max() > num_ids or target_ids.max(initial=0) > np.iinfo(np.int32).max:
        raise SourceError(f"{path} is damaged: an offset or id is out of bounds")
    return num_frequent, offsets, target_ids


def _checksum(content: bytes) -> int:
    """Return Marian's hash of whole u64 (its src/common/hash.h); four bytes at the end do not count."""
    seed = 0
    for value in np.frombuffer(content, "<u8", len(content) // 8).tolist():
        seed ^= (value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & 0xFFFFFFFFFFFFFFFF
    return seed


def _lines(
    path: Path, content: bytes, values: Sequence[Any], tokens: Sequence[Mapping[str, int]]
) -> tuple[int, Any, Any]:
    """Return the same of the text form, whose settings are the most frequent and most likely tokens and a threshold."""
    try:
        num_frequent, num_best, threshold = (
            kind(given) for kind, given in zip((int, int, float), _with_defaults(values), strict=True)
        )
        if num_frequent < 0 or num_best < 1:
            raise ValueError("the numbers of tokens must be at least 0 and 1")
        likely = _likely(content.decode("utf-8"), tokens[0], tokens[-1], threshold)
    except (TypeError, ValueError) as error:
        raise SourceError(f"{path} cannot be read as a shortlist: {error}") from None
    best = [sorted(((weight, index) for index, weight in row.items()), reverse=True)[:num_best] for row in likely]
    offsets = np.cumsum([0, *(len(row) for row in best)])
    target_ids = np.array([index for row in best for index in sorted(index for _, index in row)], np.int64)
    return num_frequent, offsets, target_ids


def _with_defaults(values: Sequence[Any]) -> Sequence[Any]:
    return [*values[:3], *(_FREQUENT, _BEST, _THRESHOLD)[len(values) :]]


def _likely(
    content: str, sources: Mapping[str, int], targets: Mapping[str, int], threshold: float
) -> list[dict[int, float]]:
    """Return the probability of the target tokens of each source token. Tokens without an id are left out."""
    likely: list[dict[int, float]] = [{} for _ in range(max(sources.values()) + 1)]
    for number, line in enumerate(content.split("\n"), start=1):
        parts = line.split()
        if not parts:
            continue
        if len(parts) != 3:
            raise ValueError(f"line {number} is {line[:60]!r}; expected target, source and probability")
        target, source, probability = parts
        is_pair = _NO_WORD not in (target, source) and target in targets and source in sources
        if is_pair and (weight := float(probability)) > threshold:
            likely[sources[source]][targets[target]] = weight
    return likely
