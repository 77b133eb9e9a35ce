"""Reading, verification and splitting of a recipe's data: sentence pairs, labelled texts and running text. No torch."""

from __future__ import annotations

import gzip
import hashlib
import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, TypeVar

from antiphon.bundle.manifest import file_entry
from antiphon.errors import RecipeError
from antiphon.training.recipe import DataConfig, DataFile, LabelledData, RunningText, TextFile

Pair = tuple[str, str]

HELD_OUT_SALT = "antiphon-held-out-v1|"
HELD_OUT_MAX_GROUP = 12
TEST_PER_MILLE = 10
VALID_PER_MILLE = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Pairs of source and target text for training, validation and test."""

    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]

    def changed(self, change: Callable[[Pair], Pair]) -> Corpus:
        """Return the corpus with every pair changed."""
        train, valid, test = ([change(pair) for pair in pairs] for pairs in (self.train, self.valid, self.test))
        return Corpus(train=train, valid=valid, test=test)


def load_corpus(config: DataConfig, folder: Path, collections: Sequence[str] | None = None) -> Corpus:
    """Read the recipe's files below `folder` and check their SHA-256.

    collections: names of the collections to read; None: all. Raises RecipeError naming the file or the collection.
    """
    if collections is not None:
        config = _of_collections(config, collections)
    if config.collections:
        return joined_corpus(list(load_collections(config, folder).values()))
    if config.pairs is not None:
        corpus = held_out_rule(_split_tabs(_read_lines(folder, config.pairs), folder / config.pairs.path))
    elif config.train and config.valid and config.test:
        corpus = Corpus(
            train=_read_parallel(folder, config.train),
            valid=_read_parallel(folder, config.valid),
            test=_read_parallel(folder, config.test),
        )
    else:
        raise RecipeError("data: give pairs, or collections, or train, valid and test")
    if config.reverse_of is not None:
        corpus = _reversed(corpus)
    if config.preprocess == "moses-lower":
        corpus = _moses_lower(corpus, config)
    return corpus


def _of_collections(config: DataConfig, names: Sequence[str]) -> DataConfig:
    known = [file.name for file in config.collections]
    if unknown := [name for name in names if name not in known]:
        raise RecipeError(
            f"collection {unknown[0]!r} is not one of the recipe's collections: {', '.join(known) or 'none'}"
        )
    return config.model_copy(update={"collections": tuple(file for file in config.collections if file.name in names)})


def load_collections(config: DataConfig, folder: Path) -> dict[str, Corpus]:
    """Read the recipe's collections, by name, as `load_corpus` reads files.

    Each is split by itself, so that its test part depends on it alone. A training pair with a sentence of a validation
    or test part of another collection is left out.
    """
    parts = {
        file.name: held_out_rule(_split_tabs(_read_lines(folder, file), folder / file.path))
        for file in config.collections
    }
    held_out = {
        (side, _match_key(text))
        for corpus in parts.values()
        for pair in (*corpus.valid, *corpus.test)
        for side, text in enumerate(pair)
    }

    def is_kept(pair: Pair) -> bool:
        return not any((side, _match_key(text)) in held_out for side, text in enumerate(pair))

    collections = {
        name: Corpus(train=[pair for pair in corpus.train if is_kept(pair)], valid=corpus.valid, test=corpus.test)
        for name, corpus in parts.items()
    }
    if config.reverse_of is None:
        return collections
    return {name: _reversed(corpus) for name, corpus in collections.items()}


def _reversed(corpus: Corpus) -> Corpus:
    """Exchange source and target, after the split: so both directions have the same test pairs."""
    return corpus.changed(lambda pair: (pair[1], pair[0]))


def joined_corpus(parts: Sequence[Corpus]) -> Corpus:
    """Return all pairs of several corpora."""
    return Corpus(
        train=[pair for part in parts for pair in part.train],
        valid=[pair for part in parts for pair in part.valid],
        test=[pair for part in parts for pair in part.test],
    )


def read_verified(folder: Path, file: DataFile) -> bytes:
    """Return a data file's bytes, decompressed if its name ends in .gz. Raises RecipeError naming the file."""
    path = folder / file.path
    if not path.is_file():
        raise RecipeError(f"{path} is missing; --data must be the folder of the recipe's files")
    digest = file_entry(path).sha256
    if digest != file.sha256:
        raise RecipeError(f"{path} has sha256 {digest[:12]}..., the recipe names {file.sha256[:12]}...")
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _read_lines(folder: Path, file: DataFile) -> list[str]:
    raw = read_verified(folder, file)
    return raw.decode("utf-8").split("\n")[: -1 if raw.endswith(b"\n") else None]


def _split_tabs(lines: list[str], path: Path) -> list[Pair]:
    pairs = []
    for number, line in enumerate(lines, start=1):
        source, tab, rest = line.partition("\t")
        if not tab:
            raise RecipeError(f"{path}: line {number} has no tab between source and target")
        pairs.append((source, rest.partition("\t")[0]))
    return pairs


def _read_parallel(folder: Path, files: tuple[DataFile, DataFile]) -> list[Pair]:
    source, target = (_read_lines(folder, file) for file in files)
    if len(source) != len(target):
        raise RecipeError(f"{files[0].path} has {len(source)} lines, {files[1].path} has {len(target)}")
    return list(zip(source, target, strict=True))


def _moses_lower(corpus: Corpus, config: DataConfig) -> Corpus:
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    def tool(language: str) -> tuple[MosesPunctNormalizer, MosesTokenizer]:
        return MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)

    sides = (tool(config.source_language), tool(config.target_language))

    def clean(text: str, side: int) -> str:
        normalizer, tokenizer = sides[side]
        tokens: str = tokenizer.tokenize(normalizer.normalize(text), return_str=True, escape=False)
        return tokens.lower()

    return corpus.changed(lambda pair: (clean(pair[0], 0), clean(pair[1], 1)))


def _match_key(text: str) -> str:
    """Return NFKC in lower case with only letters and digits; equal keys are the same sentence for the split."""
    folded = unicodedata.normalize("NFKC", text).lower()
    return " ".join("".join(char if char.isalnum() else " " for char in folded).split())


def held_out_rule(pairs: Sequence[Pair]) -> Corpus:
    """Split pairs so that no sentence, on either side, is in two parts.

    Pairs that share a source or a target sentence (compared without case and punctuation) form a group, and so do
    groups linked through them. A group of at most 12 pairs goes to test or validation by the hash of its smallest
    source: sha256(salt + source), first 8 bytes, big endian, modulo 1000: below 10 is test, below 16 validation.
    The rule depends only on the text, so it gives the same result for any order and any later edition of the data.
    """
    groups: dict[int, list[int]] = {}
    for index, root in enumerate(_connected([(_match_key(s), _match_key(t)) for s, t in pairs])):
        groups.setdefault(root, []).append(index)
    parts: dict[str, list[int]] = {"train": [], "valid": [], "test": []}
    for members in groups.values():
        parts[_part_of(min(_match_key(pairs[i][0]) for i in members), len(members))].extend(members)
    train, valid, test = ([pairs[i] for i in sorted(parts[name])] for name in ("train", "valid", "test"))
    return Corpus(train=train, valid=valid, test=test)


def _part_of(smallest_source: str, group_size: int) -> str:
    if group_size > HELD_OUT_MAX_GROUP:
        return "train"
    draw = _per_mille(HELD_OUT_SALT + smallest_source)
    if draw < TEST_PER_MILLE:
        return "test"
    return "valid" if draw < TEST_PER_MILLE + VALID_PER_MILLE else "train"


def _per_mille(text: str) -> int:
    """Return a number below 1000 that depends on the text's hash alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") % 1000


def _connected(keys: Sequence[tuple[str, str]]) -> list[int]:
    """Return the root index of each pair's connected component, by union-find with path halving."""
    parent = list(range(len(keys)))

    def find(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    first: dict[tuple[int, str], int] = {}
    for index, pair in enumerate(keys):
        for side_key in enumerate(pair):
            root = find(first.setdefault(side_key, index))
            parent[max(root, find(index))] = min(root, find(index))
    return [find(index) for index in range(len(keys))]


TEXTS_SALT = "antiphon-held-out-texts-v1|"
TEXTS_PER_MILLE = 50


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
        return _read_json(folder, file)
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


def read_parts(
    folder: Path, data: LabelledData, read: Callable[[Path, TextFile], list[Item]]
) -> dict[Part, list[Item]]:
    """Read all parts of a fine-tuning recipe's data; `read` reads one file."""

    def gather(files: Sequence[TextFile]) -> list[Item]:
        return [item for file in files for item in read(folder, file)]

    train, valid = gather(data.train), gather(data.valid)
    if not data.valid:
        valid = [item for item in train if is_held_out(item.text)]
        train = [item for item in train if not is_held_out(item.text)]
    return {"train": train, "valid": valid, "test": gather(data.test)}


def is_held_out(text: str, per_mille: int = TEXTS_PER_MILLE) -> bool:
    """Return whether a text belongs to validation if no file decides; case and white space do not matter.

    per_mille: texts of 1,000 that are held out.
    """
    return _per_mille(TEXTS_SALT + "".join(text.lower().split())) < per_mille


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


def _read_json(folder: Path, file: TextFile) -> list[Labelled]:
    try:
        pairs: list[list[str]] = json.loads(_text(folder, file))[file.key]
        return [Labelled(text=text.strip(), label=label.strip()) for text, label in pairs]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"{file.path} must be a JSON object whose {file.key!r} has a list of [text, label]: {error!r}"
        ) from None


def read_running_text(data: RunningText, folder: Path) -> dict[Part, str]:
    """Return the text of each part: the files one after the other, cut by characters as data.split says.

    Without a third share the validation part is also the test part. Raises RecipeError naming the file or field.
    """
    parts = []
    for file in data.text:
        try:
            parts.append(read_verified(folder, file).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RecipeError(f"{folder / file.path} is not UTF-8: {error}") from None
    text = "".join(parts)
    ends = [int(len(text) * sum(data.split[:count])) for count in range(1, len(data.split))]
    train, valid, *rest = (text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True))
    return {"train": train, "valid": valid, "test": rest[0] if rest else valid}
