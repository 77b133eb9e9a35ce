"""`antiphon prune`: removal of the least important attention heads from a checkpoint.

The head width does not change. The result is an ordinary checkpoint. head_importance.py measures the importance,
head_choice.py chooses the heads.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from antiphon.architecture.config import ModelConfig, ModuleHeads
from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, weights_of
from antiphon.errors import ModelError, PruneError
from antiphon.training.data.corpus import Pair, load_corpus
from antiphon.training.data.translation_data import collate, encode_pairs, plan_batches
from antiphon.training.pruning.head_choice import Choice, Each, Heads, Share
from antiphon.training.pruning.head_importance import attentions, head_importance, mean_loss
from antiphon.training.recipe import load_recipe
from antiphon.transformer.transformer import Transformer

_BATCH_TOKENS = 2048
_SEED = 0


def without_heads(model: Transformer, kept: Heads) -> Transformer:
    """Return a model with only the kept heads: equal to `model` with the other heads' outputs set to zero.

    kept: at least one head of each attention module; with T5's bias the same ones for the self-attention of a stack.
    """
    width = model.config.resolved_head_dim
    with torch.random.fork_rng(devices=[]):
        pruned = Transformer(_pruned_config(model.config, kept)).eval()
    weights = dict(model.state_dict())
    for name in attentions(model):
        _drop(weights, name, kept[name], width)
    if model.config.positions == "t5_relative":
        for stack in ("encoder", "decoder"):
            bias = f"{stack}.relative_bias.weight"
            weights[bias] = weights[bias][:, kept[f"{stack}.layers.0.self_attention"]]
    pruned.load_state_dict(weights)
    return pruned


def _pruned_config(config: ModelConfig, kept: Heads) -> ModelConfig:
    """Return the configuration with the numbers of kept heads; without module_heads if all are equal."""
    layers = {"encoder": range(config.encoder_layers), "decoder": range(config.decoder_layers)}
    modules = {
        f"{stack}_{kind}": [len(kept[f"{stack}.layers.{layer}.{kind}_attention"]) for layer in layers[stack]]
        for stack, kind in (("encoder", "self"), ("decoder", "self"), ("decoder", "cross"))
    }
    counts = {count for heads in modules.values() for count in heads}
    changes = {
        "num_heads": max(counts),
        "module_heads": ModuleHeads.model_validate(modules) if len(counts) > 1 else None,
        "head_dim": config.resolved_head_dim,
    }
    return ModelConfig.model_validate({**config.model_dump(), **changes})


def _drop(weights: dict[str, Tensor], name: str, kept: Sequence[int], width: int) -> None:
    """Keep the rows of these heads in an attention module's input projections, and their columns in its output."""
    for projection, parts in (("qkv", 3), ("query", 1), ("kv", 2)):
        for field in ("weight", "bias"):
            if (key := f"{name}.{projection}.{field}") in weights:
                rows = weights[key]
                weights[key] = rows.reshape(parts, -1, width, *rows.shape[1:])[:, list(kept)].flatten(0, 2)
    columns = weights[f"{name}.out.weight"]
    weights[f"{name}.out.weight"] = columns.reshape(len(columns), -1, width)[:, list(kept)].flatten(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pruning:
    """A pruned model with the importance [H] and the kept heads of each attention module.

    loss_before, loss_after: mean losses on the same pairs, in nats a token.
    """

    model: Transformer
    importance: dict[str, Tensor]
    kept: dict[str, list[int]]
    loss_before: float
    loss_after: float


def prune(checkpoint: Checkpoint, pairs: Sequence[Pair], choice: Choice) -> Pruning:
    """Measure importance on the pairs and remove the least important heads. Raises PruneError."""
    config = checkpoint.config
    choice.check(config)
    examples = encode_pairs(
        pairs, checkpoint.tokenizer, max_source=config.max_source_len, max_target=config.max_target_len
    )
    if not examples:
        raise PruneError("no sentence pair is within the model's lengths; importance needs at least one")
    planned = plan_batches(examples, _BATCH_TOKENS, _SEED)
    batches = [collate([examples[index] for index in members], checkpoint.tokenizer) for members in planned]
    importance = head_importance(checkpoint.model, tqdm(batches, desc="importance", unit="batch", disable=None))
    kept = choice.heads_to_keep(config, importance)
    pruned = without_heads(checkpoint.model, kept)
    return Pruning(
        model=pruned,
        importance=importance,
        kept=kept,
        loss_before=mean_loss(checkpoint.model, batches),
        loss_after=mean_loss(pruned, batches),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="directory that `antiphon train` wrote")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="directory for the pruned checkpoint; must be new")
    amount = parser.add_mutually_exclusive_group(required=True)
    amount.add_argument("--heads", type=int, metavar="N", help="number of heads that each attention module keeps")
    amount.add_argument(
        "--share", type=float, metavar="S", help="share of all heads that is removed, unevenly: 0.3 removes 30 %%"
    )
    parser.add_argument("--data", type=Path, help="measure importance on the data of a recipe, in this folder")
    parser.add_argument("--recipe", help="name of the recipe (default: that of the checkpoint)")
    parser.add_argument(
        "--part", choices=("valid", "train"), default="valid", help="part of the data (default: %(default)s)"
    )
    parser.add_argument("--source", type=Path, help="file of sources, one a line, instead of --data")
    parser.add_argument("--reference", type=Path, help="file of references for --source, one a line")
    parser.add_argument(
        "--pairs", type=int, default=2000, metavar="N", help="maximum number of pairs (default: %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Prune; return 0 when the checkpoint is written, 2 after an error, with one line on standard error."""
    try:
        for option in ("pairs", "threads"):
            if getattr(args, option) < 1:
                raise PruneError(f"--{option} is {getattr(args, option)}; it must be at least 1")
        if args.output.exists():
            raise PruneError(f"{args.output} exists; give a new directory")
        torch.set_num_threads(args.threads)
        checkpoint = load_checkpoint(args.checkpoint)
        choice = Share(args.share) if args.share is not None else Each(args.heads)
        choice.check(checkpoint.config)
        pruning = prune(checkpoint, _sample(_pairs(args, checkpoint), args.pairs), choice)
        save_checkpoint(
            args.output,
            config=pruning.model.config,
            weights=weights_of(pruning.model),
            tokenizer=checkpoint.tokenizer,
            provenance=checkpoint.provenance,
        )
    except (ModelError, OSError, UnicodeDecodeError) as error:
        print(f"antiphon prune: {error}", file=sys.stderr)
        return 2
    _report(checkpoint.model, pruning)
    return 0


def _pairs(args: argparse.Namespace, checkpoint: Checkpoint) -> list[Pair]:
    if args.source and args.reference:
        sources, references = (path.read_text(encoding="utf-8").split("\n") for path in (args.source, args.reference))
        if len(sources) != len(references):
            raise PruneError(
                f"{args.source} has {len(sources)} lines, {args.reference} has {len(references)}; they must be equal"
            )
        return list(zip(sources, references, strict=True))
    recipe: str | None = args.recipe or (checkpoint.provenance.recipe if checkpoint.provenance is not None else None)
    if args.data is None or recipe is None:
        raise PruneError("give --data (with --recipe if the checkpoint names none), or --source with --reference")
    corpus = load_corpus(load_recipe(recipe).data, args.data)
    return corpus.valid if args.part == "valid" else corpus.train


def _sample(pairs: Sequence[Pair], most: int) -> Sequence[Pair]:
    """Return at most `most` pairs, the same ones each time."""
    return pairs if len(pairs) <= most else random.Random(_SEED).sample(list(pairs), most)


def _report(before: Transformer, pruning: Pruning) -> None:
    """Print the importance of the heads of each attention module, and sizes and losses before and after."""
    for name, values in pruning.importance.items():
        dropped = set(range(len(values))).difference(pruning.kept[name])
        marked = (f"{value:.4f}{'-' if head in dropped else ' '}" for head, value in enumerate(values.tolist()))
        print(f"{name:<36} {' '.join(marked)}")
    counts = [sum(map(len, heads.values())) for heads in (pruning.importance, pruning.kept)]
    print(
        f"{counts[0]} heads to {counts[1]} in {len(pruning.kept)} attention modules (dropped: -), "
        f"{before.num_parameters:,} parameters to {pruning.model.num_parameters:,}, "
        f"loss {pruning.loss_before:.3f} to {pruning.loss_after:.3f} nats a token"
    )
