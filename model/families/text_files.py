"""Tokenizer files of a checkpoint directory: which there are, and the ids of their added tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from antiphon.model.config import ModelConfig
from antiphon.model.source_weights import SourceError
from antiphon.model.text_format import TextKind


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file. Raises SourceError naming it."""
    try:
        held = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {error}") from None
    if not isinstance(held, dict):
        raise SourceError(f"{path} is not a JSON object")
    return held


def tokenizers_file(folder: Path, family: str) -> Path:
    """tokenizer.json. Raises SourceError saying how to get one."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise SourceError(
            f"{folder} has no tokenizer.json, which {family}'s tokenizer needs; "
            "AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY) of transformers writes it"
        )
    return path


def sentencepiece_or_tokenizers(folder: Path, name: str, family: str) -> tuple[TextKind, Path]:
    """tokenizer.json, or else the SentencePiece model of this name."""
    if not (folder / "tokenizer.json").is_file() and (folder / name).is_file():
        return "sentencepiece", folder / name
    return "tokenizers", tokenizers_file(folder, family)


def special_ids_of(file: Path, config: ModelConfig, *more: int) -> tuple[int, ...]:
    """Ids that stand for no text: the model's own, these, and what tokenizer.json marks as special."""
    marked = [token["id"] for token in _added(file) if token.get("special")]
    return tuple(sorted({config.pad_id, config.bos_id, config.eos_id, config.unk_id, *more, *marked}))


def languages_of(file: Path, pattern: re.Pattern[str]) -> dict[str, int]:
    """Added tokens of tokenizer.json that are language codes, with their ids."""
    return {token["content"]: token["id"] for token in _added(file) if pattern.fullmatch(token["content"])}


def _added(file: Path) -> list[dict[str, Any]]:
    return read_json(file).get("added_tokens") or [] if file.suffix == ".json" else []
