"""`antiphon shortlist`: learn the lexical shortlist of a model (text/shortlist.py) from sentence pairs.

IBM model 1 (Brown et al. 1993, "The Mathematics of Statistical Machine Translation", section 4.1) learns the
probability t(e|f) that a source token f becomes a target token e, over the tokens of the model's own tokenizer. It is
the mean number of links from f to e, where each target token of a pair has one link, to a source token or to the empty
word. All pairs of f and e that occur together are numbered; L is the number of links that are possible in all pairs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import MANIFEST_NAME, Bundle, file_entry, load_bundle, write_manifest
from antiphon.checkpoints.checkpoint import TEXT_NAME, load_checkpoint
from antiphon.errors import CorpusError, ModelError
from antiphon.text.format import TextFormat
from antiphon.text.shortlist import Shortlist
from antiphon.text.tokenizer import Tokenizer, open_tokenizer
from antiphon.training.corpus import Pair, load_corpus
from antiphon.training.recipe import load_recipe

TokenPair = tuple[Sequence[int], Sequence[int]]
# Tokens of a side beyond which a pair is left out: its links grow with the product of the lengths.
_LONGEST = 256
# Links that are numbered together, which bounds the memory of a sort.
_PART_LINKS = 1 << 22
_SEED = 0
_MOST_HELD_OUT = 1000


@dataclass(frozen=True, slots=True)
class _Links:
    """Possible links of some pairs, grouped by target token: pairs [L], their numbers; starts and lens of a group."""

    pairs: NDArray[np.int32]
    starts: NDArray[np.int64]
    lens: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Probability t(e|f) of pairs of source token f and target token e, in ascending order of f and e."""

    sources: NDArray[np.int64]
    targets: NDArray[np.int64]
    probabilities: NDArray[np.float64]


def learn_lexicon(pairs: Sequence[TokenPair], *, num_sources: int, num_targets: int, iterations: int) -> Lexicon:
    """Return IBM model 1 of pairs of source and target tokens, none of them empty, after some iterations of EM."""
    parts, keys = _numbered(pairs, num_sources, num_targets)
    sources, targets = np.divmod(keys, num_targets)
    weights = np.ones(len(keys))
    for _ in tqdm(range(iterations), desc="EM", unit="iteration", disable=None):
        counts = np.zeros(len(keys))
        for part in parts:
            shares = weights[part.pairs]
            shares /= np.repeat(np.add.reduceat(shares, part.starts), part.lens)
            counts += np.bincount(part.pairs, shares, len(keys))
        weights = counts / np.bincount(sources, counts)[sources]
    is_word = sources < num_sources
    return Lexicon(sources[is_word], targets[is_word], weights[is_word])


def _numbered(pairs: Sequence[TokenPair], num_sources: int, num_targets: int) -> tuple[list[_Links], NDArray[np.int64]]:
    """Return the links of all pairs in parts, and the key f * num_targets + e of each number, ascending.

    The empty word is the source token num_sources.
    """
    parts: list[tuple[_Links, NDArray[np.int64]]] = []
    for members in _parts(pairs):
        source_lens = np.array([len(source) + 1 for source, _ in members])
        target_lens = np.array([len(target) for _, target in members])
        sources = np.concatenate([[*source, num_sources] for source, _ in members])
        targets = np.concatenate([target for _, target in members])
        lens = np.repeat(source_lens, target_lens)  # of the links of each target token
        starts = np.cumsum(lens) - lens
        first = np.repeat(np.cumsum(source_lens) - source_lens, target_lens)  # source token of its first link
        own = np.arange(lens.sum()) + np.repeat(first - starts, lens)
        keys, numbers = np.unique(sources[own] * num_targets + np.repeat(targets, lens), return_inverse=True)
        parts.append((_Links(numbers.astype(np.int32), starts, lens), keys))
    all_keys = np.unique(np.concatenate([keys for _, keys in parts]))
    renumbered = [
        _Links(np.searchsorted(all_keys, keys).astype(np.int32)[links.pairs], links.starts, links.lens)
        for links, keys in parts
    ]
    return renumbered, all_keys


def _parts(pairs: Sequence[TokenPair]) -> Iterator[list[TokenPair]]:
    part, num_links = [], 0
    for source, target in pairs:
        part.append((source, target))
        num_links += (len(source) + 1) * len(target)
        if num_links >= _PART_LINKS:
            yield part
            part, num_links = [], 0
    if part:
        yield part


def shortlist_of(
    lexicon: Lexicon, *, num_best: int, num_sources: int, always: Sequence[int], has_source_ids: bool
) -> Shortlist:
    """Return the shortlist of the num_best most likely target tokens of each source token; of equal ones the first."""
    order = np.lexsort((lexicon.targets, -lexicon.probabilities, lexicon.sources))
    sources = lexicon.sources[order]
    rank = np.arange(len(order)) - np.searchsorted(sources, sources)
    best = order[rank < num_best]
    return Shortlist.of_pairs(
        lexicon.sources[best],
        lexicon.targets[best],
        num_sources=num_sources,
        always=always,
        has_source_ids=has_source_ids,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """Vocabularies of a bundle or checkpoint, and the function that replaces its text format and old shortlist."""

    folder: Path
    config: ModelConfig
    text: TextFormat
    tokenizer: Tokenizer
    replace: Callable[[TextFormat], None]


def _open(folder: Path) -> _Model:
    """Open a bundle or checkpoint. Raises ModelError."""
    if (folder / MANIFEST_NAME).exists():
        bundle = load_bundle(folder)
        config, text = bundle.manifest.model, bundle.manifest.text
        tokenizer, replace = open_tokenizer(folder, text), partial(_replace_in_bundle, bundle)
    else:
        checkpoint = load_checkpoint(folder)
        config, text, tokenizer = checkpoint.config, checkpoint.text, checkpoint.tokenizer
        replace = partial(_replace_in_checkpoint, folder)
    if config.architecture != "encoder-decoder":
        raise CorpusError(f"{folder} is {config.architecture}-only; a shortlist is of a model with sources and targets")
    return _Model(folder=folder, config=config, text=text, tokenizer=tokenizer, replace=replace)


def _replace_in_bundle(bundle: Bundle, text: TextFormat) -> None:
    manifest = bundle.manifest
    files = {name: entry for name, entry in manifest.files.items() if name != manifest.text.shortlist}
    if text.shortlist is not None:
        files[text.shortlist] = file_entry(bundle.file(text.shortlist))
    write_manifest(bundle.path, manifest.model_copy(update={"text": text, "files": dict(sorted(files.items()))}))


def _replace_in_checkpoint(folder: Path, text: TextFormat) -> None:
    temporary = folder / f".{TEXT_NAME}.tmp"
    temporary.write_text(text.model_dump_json(indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / TEXT_NAME)


def _write(model: _Model, shortlist: Shortlist) -> Path:
    """Write the shortlist into its bundle or checkpoint, and return its path.

    Its name contains a part of its SHA-256: a reader finds the old file or the new one, always as its manifest says.
    """
    temporary = model.folder / ".shortlist.tmp"
    shortlist.write(temporary)
    path = model.folder / f"shortlist.{file_entry(temporary).sha256[:12]}.bin"
    temporary.replace(path)
    model.replace(model.text.model_copy(update={"shortlist": path.name}))
    if model.text.shortlist not in (None, path.name):
        (model.folder / model.text.shortlist).unlink(missing_ok=True)
    return path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", type=Path, metavar="MODEL", help="bundle, or checkpoint of `antiphon train`")
    parser.add_argument("--source", type=Path, help="file of sources, one a line")
    parser.add_argument("--reference", type=Path, help="file of their translations, one a line")
    parser.add_argument("--recipe", help="or: the training part of this recipe's data (with --data)")
    parser.add_argument("--data", type=Path, help="folder of the recipe's data files")
    parser.add_argument("--collection", nargs="+", metavar="NAME", help="only these collections of the recipe's data")
    for name, default, what in (
        ("best", 100, "target tokens of each source token, the likeliest ones"),
        ("frequent", 200, "target tokens that every source has, the most frequent ones"),
        ("iterations", 5, "iterations of EM"),
        ("pairs", 400_000, "maximum number of pairs, of which others are left out at random"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})")


def run(args: argparse.Namespace) -> int:
    """Learn and write; return 0 when the shortlist is written, 2 after an error, with one line on standard error."""
    try:
        for option in ("best", "frequent", "iterations", "pairs"):
            if getattr(args, option) < 1:
                raise CorpusError(f"--{option} is {getattr(args, option)}; it must be at least 1")
        model = _open(args.model)
        pairs = _token_pairs(args, model)
        num_held_out = min(_MOST_HELD_OUT, len(pairs) // 20)
        shortlist = _learned(args, model, pairs[num_held_out:])
        path = _write(model, shortlist)
    except (ModelError, OSError, UnicodeDecodeError) as error:
        print(f"antiphon shortlist: {error}", file=sys.stderr)
        return 2
    _report(model, shortlist, pairs[:num_held_out])
    print(f"written: {path}, from {len(pairs) - num_held_out:,} pairs")
    return 0


def _token_pairs(args: argparse.Namespace, model: _Model) -> list[TokenPair]:
    """Return the tokens of the texts in random order, without those of the template. Raises CorpusError."""
    texts = _texts(args)
    texts = random.Random(_SEED).sample(texts, min(args.pairs, len(texts)))
    encoded = zip(
        model.tokenizer.encode_batch([source for source, _ in texts]),
        model.tokenizer.encode_targets([reference for _, reference in texts]),
        strict=True,
    )
    pairs: list[TokenPair] = [pair for pair in encoded if all(0 < len(side) <= _LONGEST for side in pair)]
    if not pairs:
        raise CorpusError(f"the texts have no pair of 1 to {_LONGEST} tokens a side")
    return pairs


def _texts(args: argparse.Namespace) -> Sequence[Pair]:
    """Read the pairs of the files, or of a recipe's training part. Raises ModelError."""
    if args.recipe and args.data:
        return load_corpus(load_recipe(args.recipe).data, args.data, args.collection).train
    if not (args.source and args.reference):
        raise CorpusError("give --source with --reference, or --recipe with --data")
    sources, references = (path.read_text(encoding="utf-8").split("\n") for path in (args.source, args.reference))
    if len(sources) != len(references):
        raise CorpusError(
            f"{args.source} has {len(sources)} lines, {args.reference} has {len(references)}; they must be equal"
        )
    return list(zip(sources, references, strict=True))


def _learned(args: argparse.Namespace, model: _Model, pairs: Sequence[TokenPair]) -> Shortlist:
    config, text = model.config, model.text
    num_sources, num_targets = config.resolved_source_vocab_size, config.vocab_size
    lexicon = learn_lexicon(pairs, num_sources=num_sources, num_targets=num_targets, iterations=args.iterations)
    counts = np.bincount(np.concatenate([target for _, target in pairs]), minlength=num_targets)
    frequent = np.argsort(-counts, kind="stable")[: args.frequent]
    is_shared = text.target in (None, text.source) and text.target_vocabulary in (None, text.source_vocabulary)
    return shortlist_of(
        lexicon,
        num_best=args.best,
        num_sources=num_sources,
        always=[*frequent[counts[frequent] > 0].tolist(), config.eos_id],
        has_source_ids=is_shared and num_sources <= num_targets,
    )


def _report(model: _Model, shortlist: Shortlist, pairs: Sequence[TokenPair]) -> None:
    """Print the number of candidates and the share of reference tokens among them, of pairs that were held out."""
    if not pairs:
        return
    candidates = [shortlist.candidates(source) for source, _ in pairs]
    covered = np.concatenate([np.isin(target, own) for (_, target), own in zip(pairs, candidates, strict=True)])
    print(
        f"candidates of {len(pairs):,} other sources: {np.mean([len(own) for own in candidates]):,.0f} of "
        f"{model.config.vocab_size:,} target tokens on average, with {100 * covered.mean():.2f} % of the references'"
    )
