"""Greedy agreement of cuda graphs in float16 and bfloat16 with float32, computed on the processor without a card.

    python -m antiphon.tools.bench.gpu.agreement [BUNDLE] --recipe tatoeba-en-de --count 512

Translates held-out sentences with the graphs of a bundle's weights, node by node by their references. On a card the
products are summed in another order, so its figures can differ a little.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import GraphSet, Precision, load_bundle
from antiphon.export.cuda_stepper import cuda_stepper
from antiphon.export.export import write_graphs
from antiphon.export.unpacking import unpack_checkpoint
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.text.tokenizer import open_tokenizer
from antiphon.tools.bench.corpus import Ids, held_out
from antiphon.tools.bench.report import BenchError

_PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16", "float16")


def translate(folder: Path, graphs: GraphSet, config: ModelConfig, sources: Sequence[Ids], longest: int) -> list[Ids]:
    """Return the greedy target of each source, end token included, at most `longest` tokens."""
    step = cuda_stepper(folder, graphs, config).start([np.array(source) for source in sources], longest + 1)
    ids, chosen = np.full(len(sources), config.bos_id), []
    for position in range(longest):
        ids = step(ids, np.full(len(sources), position, np.int32)).argmax(axis=1)
        chosen.append(ids)
    return [_until_end(target, config.eos_id) for target in np.stack(chosen, axis=1).tolist()]


def agreement(targets: Sequence[Ids], expected: Sequence[Ids]) -> tuple[int, int]:
    """Return the number of equal targets, and the number of tokens before the first difference of each target."""
    num_equal = sum(list(target) == list(other) for target, other in zip(targets, expected, strict=True))
    return num_equal, sum(map(_num_common, targets, expected))


def _until_end(target: list[int], eos_id: int) -> list[int]:
    return target[: target.index(eos_id) + 1] if eos_id in target else target


def _num_common(target: Ids, expected: Ids) -> int:
    for index, (token_id, expected_id) in enumerate(zip(target, expected, strict=False)):
        if token_id != expected_id:
            return index
    return min(len(target), len(expected))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each precision; return 0, or 2 without the recipe's data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?", default=SHIPPED_BUNDLE, metavar="BUNDLE")
    parser.add_argument("--recipe", default="tatoeba-en-de", help="recipe whose held-out sentences are translated")
    parser.add_argument("--data", type=Path, help="folder of its data (default: $ANTIPHON_DATA)")
    parser.add_argument("--count", type=int, default=512, help="number of sentences")
    parser.add_argument("--longest", type=int, default=40, help="maximum number of tokens of a translation")
    args = parser.parse_args(arguments)
    try:
        texts = held_out(args.recipe, args.data).texts[: args.count]
    except BenchError as error:
        print(f"agreement: {error}", file=sys.stderr)
        return 2
    bundle = load_bundle(args.bundle)
    model, tokenizer = unpack_checkpoint(bundle).model, open_tokenizer(bundle.path, bundle.manifest.text)
    sources = [[*tokenizer.encode(text), model.config.eos_id] for text in texts]
    with tempfile.TemporaryDirectory() as work:
        sets = write_graphs(model, Path(work), _PRECISIONS, ("cuda",))
        targets = {
            graphs.precision: translate(Path(work), graphs, model.config, sources, args.longest) for graphs in sets
        }
    num_tokens = sum(map(len, targets["float32"]))
    for precision, translations in targets.items():
        num_equal, num_common = agreement(translations, targets["float32"])
        tokens = f"{num_common} of {num_tokens} tokens before the first difference"
        print(f"{precision}: {num_equal} of {len(texts)} targets equal, {tokens}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
