"""Sentences of a benchmark: lines of a file, the held-out part of a recipe's data, or built-in ones; and their BLEU."""

from __future__ import annotations

import gzip
import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from antiphon.load.workload import EVERYDAY
from antiphon.text.format import TextFormat
from antiphon.text.tokenizer import Tokenizer, encode_sources
from antiphon.tools.bench.report import BenchError

_ORDER_SEED = 1

Ids = list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Sentences in a fixed random order, with their references if they are known.

    is_tokenised: the text is already tokenised, so that scoring must not tokenise it again.
    """

    texts: tuple[str, ...]
    references: tuple[str, ...] | None = None
    is_tokenised: bool = False


def everyday() -> Corpus:
    """Return the built-in sentences."""
    return _shuffled([(text, None) for text in EVERYDAY])


def read_corpus(source: Path, reference: Path | None) -> Corpus:
    """Read the lines of a file and their references, line by line. Blank sources are skipped.

    Raises BenchError, which names --source or --reference.
    """
    sources = _read("--source", source)
    references = [None] * len(sources) if reference is None else _read("--reference", reference)
    if len(references) != len(sources):
        raise BenchError(f"--reference {reference} has {len(references)} lines, {source} has {len(sources)}")
    pairs = [pair for pair in zip(sources, references, strict=True) if pair[0].strip()]
    if not pairs:
        raise BenchError(f"--source {source} holds no sentence")
    return _shuffled(pairs)


def held_out(name: str, data: Path | None) -> Corpus:
    """Return the held-out test part of a recipe's data, each source once. Raises BenchError, which names --recipe."""
    from antiphon.errors import RecipeError
    from antiphon.training.corpus import load_corpus
    from antiphon.training.recipe import load_recipe

    folder = data or Path(os.environ.get("ANTIPHON_DATA", "."))
    try:
        recipe = load_recipe(name)
        pairs = load_corpus(recipe.data, folder).test
    except RecipeError as error:
        raise BenchError(f"--recipe {name}: {error}") from None
    first_references = dict(reversed(pairs))
    return _shuffled(list(first_references.items()), is_tokenised=recipe.data.preprocess == "moses-lower")


def repeat(texts: Sequence[str], count: int | None) -> list[str]:
    """Return `count` texts, repeated in a cycle from the first one; None returns each once."""
    return list(itertools.islice(itertools.cycle(texts), len(texts) if count is None else count))


def _shuffled(pairs: Sequence[tuple[str, str | None]], *, is_tokenised: bool = False) -> Corpus:
    """Shuffle the pairs: files of sentences are often sorted by length, and traffic is not."""
    shuffled = list(pairs)
    random.Random(_ORDER_SEED).shuffle(shuffled)
    references = tuple(reference for _, reference in shuffled if reference is not None)
    return Corpus(
        texts=tuple(text for text, _ in shuffled),
        references=references if len(references) == len(shuffled) else None,
        is_tokenised=is_tokenised,
    )


def tokenize(texts: list[str], tokenizer: Tokenizer, text: TextFormat, max_source_len: int) -> list[Ids]:
    """Return the source ids of each text, as the model reads it. Raises BenchError if one is too long for the model."""
    sources = encode_sources(tokenizer, text, texts)
    longest = max(range(len(sources)), key=lambda index: len(sources[index]))
    if len(sources[longest]) > max_source_len:
        raise BenchError(
            f"--source: {texts[longest][:40]!r}... has {len(sources[longest])} tokens; "
            f"the model takes at most {max_source_len}"
        )
    return sources


def _read(flag: str, path: Path) -> list[str]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{flag} {path} cannot be read: {error}") from None
    return text.removesuffix("\n").split("\n")


def bleu(hypotheses: Sequence[str], corpus: Corpus) -> float:
    """Return the sacreBLEU score of translations of all sentences of a corpus, in its order.

    Raises BenchError if sacreBLEU is not installed.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ModuleNotFoundError:
        raise BenchError("BLEU needs sacrebleu, which is not installed; run: pip install sacrebleu") from None
    assert corpus.references is not None
    score = BLEU(tokenize="none" if corpus.is_tokenised else "13a", force=corpus.is_tokenised)
    return float(score.corpus_score(list(hypotheses), [list(corpus.references)]).score)
