"""Reading of texts with and without labels, in the formats of a recipe's TextFile. Works on text only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from antiphon.errors import RecipeError
from antiphon.training.data.corpus import read_verified
from antiphon.training.recipe_data import LabelledData, TextFile

HELD_OUT_SALT = "antiphon-held-out-texts-v1|"
VALID_PER_MILLE = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelled:
    """A text and its label."""

    text: str
    label: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagged:
    """Words and the BIO tag of each; the text is the words joined by spaces."""

    words: tuple[str, ...]
    tags: tuple[str, ...]

    @property
    def text(self) -> str:
        """Text of the sentence for the model."""
        return " ".join(self.words)


Item = TypeVar("Item", Labelled, Tagged)
Part = Literal["train", "valid", "test"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts(Generic[Item]):
    """Labelled texts for training, validation and test."""

    train: list[Item]
    valid: list[Item]
    test: list[Item]


def part_of(parts: Parts[Item], part: Part) -> list[Item]:
    """Return one of the parts."""
    return {"train": parts.train, "valid": parts.valid, "test": parts.test}[part]


def read_texts(folder: Path, file: TextFile) -> list[str]:
    """Return the texts of a file of any format, without labels. Raises RecipeError naming the file."""
    if file.format == "lines":
        return [line for line in _lines(folder, file) if line.strip()]
    if file.format == "tsv":
        return [text for line in _lines(folder, file) if (text := line.partition("\t")[0]).strip()]
    if file.format == "conll":
        return [item.text for item in read_tagged(folder, file)]
    return [item.text for item in read_labelled(folder, file)]


def read_documents(folder: Path, file: TextFile) -> list[list[str]]:
    """Return the documents of a file with one sentence a line and a blank line between documents, as for BERT.

    Raises RecipeError naming the file.
    """
    if file.format != "lines":
        raise RecipeError(f"{file.path}: format={file.format!r} does not fit data.ordered; it must be 'lines'")
    stripped = (line.strip() for line in _lines(folder, file))
    return [list(group) for is_text, group in groupby(stripped, key=bool) if is_text]


def read_labelled(folder: Path, file: TextFile) -> list[Labelled]:
    """Return texts and labels of a tsv, snips or json file. Raises RecipeError naming the file."""
    if file.format == "tsv":
        return [_split_label(line, file, number) for number, line in enumerate(_lines(folder, file), start=1)]
    if file.format == "snips":
        return _read_snips(folder, file)
    if file.format == "json":
        return _read_pairs(folder, file)
    raise RecipeError(f"{file.path}: format={file.format!r} has no labels of texts; it must be tsv, snips or json")


def read_tagged(folder: Path, file: TextFile) -> list[Tagged]:
    """Return the sentences of a conll file. Raises RecipeError naming the file and line."""
    if file.format != "conll":
        raise RecipeError(f"{file.path}: format={file.format!r} has no labels of words; it must be 'conll'")
    numbered = enumerate(_lines(folder, file), start=1)
    sentences = []
    for is_text, group in groupby(numbered, key=lambda pair: bool(pair[1].strip())):
        if is_text:
            words, tags = zip(*(_split_tag(line, file, number) for number, line in group), strict=True)
            sentences.append(Tagged(words=words, tags=tags))
    return sentences


def read_parts(folder: Path, data: LabelledData, read: Callable[[Path, TextFile], list[Item]]) -> Parts[Item]:
    """Read all parts of a fine-tuning recipe's data; `read` reads one file."""

    def gather(files: Sequence[TextFile]) -> list[Item]:
        return [item for file in files for item in read(folder, file)]

    train, valid = gather(data.train), gather(data.valid)
    if not data.valid:
        valid = [item for item in train if is_held_out(item.text)]
        train = [item for item in train if not is_held_out(item.text)]
    return Parts(train=train, valid=valid, test=gather(data.test))


def is_held_out(text: str, per_mille: int = VALID_PER_MILLE) -> bool:
    """Return whether a text belongs to validation if no file decides; case and white space do not matter.

    per_mille: texts of 1,000 that are held out.
    """
    folded = "".join(text.lower().split())
    digest = hashlib.sha256((HELD_OUT_SALT + folded).encode()).digest()
    return int.from_bytes(digest[:8], "big") % 1000 < per_mille


def _lines(folder: Path, file: TextFile) -> list[str]:
    # splitlines would also split at U+2028 and similar characters, which can be part of a text.
    return [line.removesuffix("\r") for line in _text(folder, file).removesuffix("\n").split("\n")]


def _text(folder: Path, file: TextFile) -> str:
    try:
        return read_verified(folder, file).decode(file.encoding)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{folder / file.path} is not encoding={file.encoding!r}: {error}") from None


def _split_label(line: str, file: TextFile, number: int) -> Labelled:
    text, tab, label = line.partition("\t")
    if not tab or not text.strip() or not label.strip():
        raise RecipeError(f"{file.path}: line {number} must be text, tab and label")
    return Labelled(text=text, label=label.strip())


def _split_tag(line: str, file: TextFile, number: int) -> tuple[str, str]:
    word, _, tag = line.partition("\t")
    tag = tag.strip()
    if not word.strip() or not (tag == "O" or (tag[:2] in ("B-", "I-") and tag[2:])):
        raise RecipeError(f"{file.path}: line {number} must be word, tab and one of O, B-LABEL, I-LABEL")
    return word, tag


def _read_snips(folder: Path, file: TextFile) -> list[Labelled]:
    try:
        content: dict[str, list[dict[str, Any]]] = json.loads(_text(folder, file))
        return [
            Labelled(text="".join(chunk["text"] for chunk in item["data"]), label=intent)
            for intent, items in content.items()
            for item in items
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"{file.path} must be JSON of the form {{intent: [{{data: [{{text}}]}}]}}: {error!r}"
        ) from None


def _read_pairs(folder: Path, file: TextFile) -> list[Labelled]:
    try:
        pairs: list[list[str]] = json.loads(_text(folder, file))[file.key]
        return [Labelled(text=text.strip(), label=label.strip()) for text, label in pairs]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"{file.path} must be a JSON object whose {file.key!r} has a list of [text, label]: {error!r}"
        ) from None
