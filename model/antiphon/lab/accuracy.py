"""Accuracy of trained models: exact match, log-probabilities of targets, BLEU, and scores after fine-tuning."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from sacrebleu.metrics.bleu import BLEU
from torch import Tensor

from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint
from antiphon.text.tokenizer import Tokenizer
from antiphon.training.batches import IGNORED_LABEL
from antiphon.training.corpus import Pair
from antiphon.training.recipe import FineTuneRecipe
from antiphon.training.task import Group
from antiphon.training.trainer import Trainer
from antiphon.training.translation import Example, collate
from antiphon.transformer.greedy import greedy


def examples_of(tokenizer: Tokenizer, pairs: Sequence[Pair]) -> list[Example]:
    """Return the token ids of all pairs of texts."""
    sources = tokenizer.encode_batch([source for source, _ in pairs])
    targets = tokenizer.encode_batch([target for _, target in pairs])
    return [
        Example(source=[*source, tokenizer.eos_id], target=target)
        for source, target in zip(sources, targets, strict=True)
    ]


GreedyDecoder = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
"""Maps sources with end token, and a limit of target tokens, to target ids without end token."""
ExactMatches = dict[int, list[bool]]
"""For each number of target tokens without end token, ascending: of each example, True if its output is correct."""


def share_correct(matches: ExactMatches) -> float:
    """Return the share of correct outputs, from 0 to 1."""
    return statistics.fmean(is_correct for results in matches.values() for is_correct in results)


def exact_match(
    decode: GreedyDecoder, tokenizer: Tokenizer, pairs: Sequence[Pair], *, batch_rows: int = 128
) -> ExactMatches:
    """Decode every source greedily, in batches of similar target length; compare the outputs with their targets.

    The model's maximum lengths must include the longest source and target with end tokens. Raises ValueError for no
    pairs.
    """
    if not pairs:
        raise ValueError("pairs is empty; exact match needs at least one pair")
    examples = sorted(examples_of(tokenizer, pairs), key=lambda example: (len(example.target), len(example.source)))
    matches: ExactMatches = {}
    for start in range(0, len(examples), batch_rows):
        batch = examples[start : start + batch_rows]
        # One token more than the longest target: an output without end token is then longer than its target.
        outputs = decode([example.source for example in batch], len(batch[-1].target) + 1)
        for example, ids in zip(batch, outputs, strict=True):
            matches.setdefault(len(example.target), []).append(ids == example.target)
    return matches


_FORCED_ROWS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Forced:
    """Log-probability, in nats, of each token of one target, end token last, and whether it is the most likely one."""

    logprobs: list[float]
    is_best: list[bool]


@torch.no_grad()
def forced(checkpoint: Checkpoint, pairs: Sequence[Pair]) -> list[Forced]:
    """Return the log-probabilities of the target of each pair; all pairs must be within the model's lengths."""
    examples = examples_of(checkpoint.tokenizer, pairs)
    targets_forced: list[Forced] = []
    for start in range(0, len(examples), _FORCED_ROWS):
        targets_forced += _forced_batch(checkpoint, examples[start : start + _FORCED_ROWS])
    return targets_forced


def _forced_batch(checkpoint: Checkpoint, examples: Sequence[Example]) -> list[Forced]:
    config = checkpoint.config
    batch = collate(examples, checkpoint.tokenizer).within(config.max_source_len, config.max_target_len)
    logits: Tensor = checkpoint.model(batch.source, batch.inputs, batch.source_lens)  # [B, T, V]
    labels = batch.labels.where(batch.labels != IGNORED_LABEL, 0)
    logprobs = logits.log_softmax(dim=-1).gather(2, labels[:, :, None]).squeeze(2)
    is_best = logits.argmax(dim=-1) == batch.labels
    lens = (batch.labels != IGNORED_LABEL).sum(dim=1).tolist()
    return [
        Forced(logprobs=logprobs[row, :length].tolist(), is_best=is_best[row, :length].tolist())
        for row, length in enumerate(lens)
    ]


_TRANSLATED_ROWS = 64


def translations(checkpoint: Checkpoint, sources: Sequence[str], max_new_tokens: int) -> list[str]:
    """Return the greedy translation of each source; similar lengths are decoded together."""
    tokenizer = checkpoint.tokenizer
    encoded = [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(list(sources))]
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index]))
    answers = [""] * len(encoded)
    for start in range(0, len(order), _TRANSLATED_ROWS):
        chosen = order[start : start + _TRANSLATED_ROWS]
        ids = greedy(checkpoint.model, [encoded[index] for index in chosen], max_new_tokens)
        for index, target in zip(chosen, ids, strict=True):
            answers[index] = tokenizer.decode(target)
    return answers


def bleu_of(hypotheses: Sequence[str], pairs: Sequence[Pair], *, is_tokenised: bool) -> float:
    """Return sacreBLEU of translations of all pairs; is_tokenised: texts are split by Moses already."""
    score = BLEU(tokenize="none" if is_tokenised else "13a", force=is_tokenised)
    return float(score.corpus_score(list(hypotheses), [[target for _, target in pairs]]).score)


def fine_tune(recipe: FineTuneRecipe, data: Path, averaged: Path, *, keep_weights: bool = True) -> Path:
    """Fine-tune the checkpoint `averaged`, once for each recipe, in a folder beside it; return the new checkpoint.

    keep_weights: False: begin with random weights of the same shape.
    """
    described = f"{recipe.model_dump_json(exclude_defaults=True)}|{keep_weights}"
    folder = averaged.with_name(f"{recipe.name}.{hashlib.sha256(described.encode()).hexdigest()[:8]}")
    if not (folder / "averaged" / "scores.json").is_file():
        init = load_checkpoint(averaged)
        Trainer(recipe, data, folder, Group.join(), init=init, keep_weights=keep_weights).run()
    return folder / "averaged"


def score_of(fine_tuned: Path) -> float:
    """Return the accuracy of a classifier or the F1 of a tagger on its test part, in percent."""
    scores = json.loads((fine_tuned / "scores.json").read_text(encoding="utf-8"))
    return 100 * float(scores["accuracy"] if "accuracy" in scores else scores["f1"])
