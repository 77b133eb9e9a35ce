"""Vocabularies and text format of a CTranslate2 directory.

A vocabulary is a text file with one token a line, or a JSON list. CTranslate2 adds the unknown token if it is missing
(src/vocabulary.cc). Texts are tokens between spaces, or are segmented by SentencePiece models in the directory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.settings import Settings
from antiphon.errors import SourceError
from antiphon.text.format import Template, TextFormat

Tokens = tuple[list[str], list[str]]
_PIECES = (".spm", ".model")


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
    found = sorted(path.name for path in folder.iterdir() if path.suffix in _PIECES)
    if len(found) <= 1 or (len(found) == 2 and found[0].startswith("source") and found[1].startswith("target")):
        return found
    raise SourceError(
        f"{folder} has several SentencePiece models: {', '.join(found)}; keep one for both sides, or source and target"
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
