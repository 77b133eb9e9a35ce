"""`antiphon prune`: removal of the least important attention heads from a checkpoint.

The importance of a head is the gradient of the loss with respect to a gate on its output. Michel et al. 2019, "Are
Sixteen Heads Really Better than One?", section 4.1: the mean over sentence pairs of |d loss / d gate| with all gates at
1. It is a first-order estimate of the loss increase without the head. A pruned model keeps as many heads in each
attention module, or a share of all heads. The head width does not change, and the result is an ordinary checkpoint.

Axes: B batch, T positions, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from antiphon.architecture.config import ModelConfig, ModuleHeads
from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, weights_of
from antiphon.errors import ModelError, PruneError
from antiphon.training.batches import IGNORED_LABEL
from antiphon.training.corpus import Pair, load_corpus
from antiphon.training.recipe import load_recipe
from antiphon.training.translation import Batch, collate, encode_pairs, plan_batches
from antiphon.transformer.layers import CrossAttention, SelfAttention
from antiphon.transformer.transformer import Transformer

Heads = Mapping[str, Sequence[int]]
"""Heads of each attention module, by its name in the Transformer, in ascending order."""


@dataclass(frozen=True, slots=True)
class HeadsPerModule:
    """Keep num_heads heads in each attention module: its most important ones, or all if it has fewer."""

    num_heads: int

    def check(self, config: ModelConfig) -> None:
        """Raise PruneError unless the model can be pruned like this."""
        _check_kind(config)
        most = max(_counts(config))
        if not 1 <= self.num_heads < most:
            raise PruneError(f"--heads is {self.num_heads}; it must be from 1 to {most - 1}, fewer than the model has")

    def heads_to_keep(self, config: ModelConfig, importance: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Return the kept heads. importance: [H] for each attention module. If two are equal, the first one is kept.

        All layers of a stack share T5's relative bias, which has a column for each head. So the self-attention of all
        layers keeps the same heads: those with the largest sum over the layers.
        """
        ranked = dict(importance)
        if config.positions == "t5_relative":
            for stack in ("encoder", "decoder"):
                shared = [name for name in ranked if name.startswith(stack) and name.endswith("self_attention")]
                total = torch.stack([importance[name] for name in shared]).sum(dim=0)
                ranked.update(dict.fromkeys(shared, total))
        return {
            name: sorted(values.argsort(descending=True, stable=True)[: self.num_heads].tolist())
            for name, values in ranked.items()
        }


@dataclass(frozen=True, slots=True)
class Share:
    """Remove this share of all heads, rounded to whole heads: the least important ones of all modules together.

    The importance of each module is divided by its l2 norm first (Michel et al. 2019, section 4.1, after Molchanov et
    al. 2017): gradients of different layers have different scales, so that a layer of small ones would lose all heads.
    Each module keeps at least its most important head, because no operator computes an attention without heads.
    """

    removed: float

    def check(self, config: ModelConfig) -> None:
        """Raise PruneError unless the model can be pruned like this."""
        _check_kind(config)
        if config.positions == "t5_relative":
            raise PruneError(
                "positions='t5_relative' cannot be pruned by --share: the layers of a stack share the bias of their "
                "heads; give --heads"
            )
        total, num_modules = sum(_counts(config)), len(_counts(config))
        removable = total - num_modules
        if not 0 < self.removed < 1 or not 1 <= round(self.removed * total) <= removable:
            raise PruneError(
                f"--share is {self.removed:g}; it must be from 1/{total} to {removable}/{total} of the {total} heads: "
                f"each of the {num_modules} attention modules keeps at least one"
            )

    def heads_to_keep(self, config: ModelConfig, importance: Mapping[str, Tensor]) -> dict[str, list[int]]:
        """Return the kept heads. importance: [H] for each attention module. If two are equal, the first one is kept."""
        scores = {
            (name, head): score
            for name, values in importance.items()
            for head, score in enumerate((values / values.norm().clamp(min=1e-30)).tolist())
        }
        protected = {(name, int(values.argmax())) for name, values in importance.items()}
        most_first = sorted((head for head in scores if head not in protected), key=scores.__getitem__, reverse=True)
        kept = protected.union(most_first[: len(most_first) - round(self.removed * len(scores))])
        return {
            name: [head for head in range(len(values)) if (name, head) in kept] for name, values in importance.items()
        }


Choice = HeadsPerModule | Share


def _check_kind(config: ModelConfig) -> None:
    """Raise PruneError for models that cannot be pruned at all."""
    if config.architecture != "encoder-decoder":
        raise PruneError(f"architecture={config.architecture!r} cannot be pruned; only encoder-decoder models can")
    if config.decoder_self != "attention":
        raise PruneError(f"decoder_self={config.decoder_self!r} cannot be pruned: it has no heads")
    if config.positions == "alibi":
        raise PruneError(
            "positions='alibi' cannot be pruned: the slopes of the kept heads would change with the number of heads"
        )


def _counts(config: ModelConfig) -> list[int]:
    """Return the number of heads of each attention module of an encoder-decoder model."""
    return [count for _, heads in config.resolved_module_heads for count in heads]


Attention = SelfAttention | CrossAttention


def attentions(model: Transformer) -> dict[str, Attention]:
    """Return all attention modules by name, in the order of computation."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, SelfAttention | CrossAttention)
    }


@contextmanager
def head_gates(model: Transformer, gates: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiply each head's output by its gate inside the context.

    gates: for each attention module [H], or [B, H] with separate gates for each row.
    """
    with ExitStack() as hooks:
        for name, attention in attentions(model).items():
            if name in gates:
                handle = attention.out.register_forward_pre_hook(partial(_gated, gates[name]))
                hooks.callback(handle.remove)
        yield


def _gated(gate: Tensor, _: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Return the concatenated heads [B, T, H D] multiplied by their gates."""
    (heads,) = inputs
    per_head = heads.reshape(*heads.shape[:-1], gate.shape[-1], -1)  # [B, T, H, D]
    gate = gate if gate.ndim == 1 else gate[:, None]
    gated: Tensor = per_head * gate[..., None]
    return gated.flatten(-2)


def head_importance(model: Transformer, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """Return the importance [H] float32 of the heads of each attention module, over all rows of all batches.

    Raises ValueError without batches.
    """
    num_heads = {name: attention.heads[0] for name, attention in attentions(model).items()}
    totals = {name: torch.zeros(heads) for name, heads in num_heads.items()}
    num_rows = 0
    for batch in batches:
        rows = batch.source.shape[0]
        gates = {name: torch.ones(rows, heads, requires_grad=True) for name, heads in num_heads.items()}
        with head_gates(model, gates):
            total = sentence_losses(model, batch).sum()
        # A row's loss depends only on the row's gates, so one backward pass gives the gradients of all rows.
        gradients = torch.autograd.grad(total, list(gates.values()))
        for name, gradient in zip(gates, gradients, strict=True):
            totals[name] += gradient.abs().sum(dim=0)
        num_rows += rows
    if not num_rows:
        raise ValueError("importance needs at least one batch")
    return {name: total / num_rows for name, total in totals.items()}


@torch.no_grad()
def mean_loss(model: Transformer, batches: Iterable[Batch]) -> float:
    """Return the mean of sentence_losses over all rows of all batches, in nats a token."""
    return float(torch.cat([sentence_losses(model, batch) for batch in batches]).mean())


def sentence_losses(model: Transformer, batch: Batch) -> Tensor:
    """Return the cross entropy of each row, [B], in nats a token; the end token counts."""
    logits = model(batch.source, batch.inputs, batch.source_lens)  # [B, T, V]
    losses = functional.cross_entropy(
        logits.transpose(1, 2), batch.labels, ignore_index=IGNORED_LABEL, reduction="none"
    )
    return losses.sum(dim=1) / (batch.labels != IGNORED_LABEL).sum(dim=1)


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
        choice = Share(args.share) if args.share is not None else HeadsPerModule(args.heads)
        choice.check(checkpoint.config)
        pruning = prune(checkpoint, _sample(_pairs(args, checkpoint), args.pairs), choice)
        save_checkpoint(
            args.output,
            config=pruning.model.config,
            weights=weights_of(pruning.model),
            tokenizer=checkpoint.tokenizer,
            text=checkpoint.text,
            text_folder=checkpoint.text_folder,
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
