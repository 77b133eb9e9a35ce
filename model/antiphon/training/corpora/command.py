"""`antiphon corpus`: makes data files of recipes from packages of Debian.

The packages are pinned by version and SHA-256. The same packages give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from antiphon.errors import ModelError
from antiphon.training.corpora.documents import write_corpus, write_novels
from antiphon.training.corpora.packages import load_packages, load_programs
from antiphon.training.corpora.pairs import write_games, write_pairs


def _write_documents(debs: Path, output: Path) -> list[Path]:
    target, counts = write_corpus(load_packages(), debs, output)
    for count in counts:
        print(count.row)
    print(f"{sum(c.documents for c in counts):,} documents, {sum(c.sentences for c in counts):,} sentences, ", end="")
    print(f"{sum(c.words for c in counts):,} words")
    return [target]


def _write_games(debs: Path, output: Path) -> list[Path]:
    return write_games(load_programs(), debs, output)


CORPORA: Mapping[str, Callable[[Path, Path], Sequence[Path]]] = {
    "debian-docs": _write_documents,
    "debian-games": _write_games,
    "ding": write_pairs,
    "jane-austen": write_novels,
}
"""Function of each corpus from the folders of packages and of the corpus to the files that it wrote."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("corpus", choices=[*CORPORA], help="corpus to make")
    parser.add_argument("--output", type=Path, required=True, metavar="DATA", help="data folder; gets DATA/CORPUS")
    parser.add_argument("--debs", type=Path, help="folder that keeps the packages (default: DATA/debs)")


def run(args: argparse.Namespace) -> int:
    """Make the corpus; return 0 at the end, 2 after an error, with one line on standard error."""
    try:
        written = CORPORA[args.corpus](args.debs or args.output / "debs", args.output / args.corpus)
    except (ModelError, OSError) as error:
        print(f"antiphon corpus: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(f"{path} sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return 0
