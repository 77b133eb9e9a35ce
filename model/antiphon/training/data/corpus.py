"""Reading, verification and splitting of sentence pairs; no sentence is in two parts. Works on text only."""

from __future__ import annotations

import gzip
import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon.bundle.manifest import file_entry
from antiphon.errors import RecipeError
from antiphon.training.recipe_data import DataConfig, DataFile

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


def load_corpus(config: DataConfig, folder: Path) -> Corpus:
    """Read the recipe's files below `folder` and check their SHA-256. Raises RecipeError naming the file."""
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

    found = {
        name: Corpus(train=[pair for pair in corpus.train if is_kept(pair)], valid=corpus.valid, test=corpus.test)
        for name, corpus in parts.items()
    }
    return found if config.reverse_of is None else {name: _reversed(corpus) for name, corpus in found.items()}


def _reversed(corpus: Corpus) -> Corpus:
    """Exchange source and target, after the split: so both directions have the same test pairs."""

    def exchanged(pairs: Sequence[Pair]) -> list[Pair]:
        return [(target, source) for source, target in pairs]

    return Corpus(train=exchanged(corpus.train), valid=exchanged(corpus.valid), test=exchanged(corpus.test))


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
    found = file_entry(path).sha256
    if found != file.sha256:
        raise RecipeError(f"{path} has sha256 {found[:12]}..., the recipe names {file.sha256[:12]}...")
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

    def clean_all(pairs: list[Pair]) -> list[Pair]:
        return [(clean(source, 0), clean(target, 1)) for source, target in pairs]

    return Corpus(train=clean_all(corpus.train), valid=clean_all(corpus.valid), test=clean_all(corpus.test))


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
    digest = hashlib.sha256((HELD_OUT_SALT + smallest_source).encode()).digest()
    draw = int.from_bytes(digest[:8], "big") % 1000
    if draw < TEST_PER_MILLE:
        return "test"
    return "valid" if draw < TEST_PER_MILLE + VALID_PER_MILLE else "train"


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
