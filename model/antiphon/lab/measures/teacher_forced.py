"""Log-probabilities of given targets: what a model thinks of the correct answer, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.training.batches import IGNORED_LABEL
from antiphon.training.corpus import Pair
from antiphon.training.translation import Example, collate

_ROWS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Forced:
    """Log-probability, in nats, of each token of one target, end token last, and whether it is the most likely one."""

    logprobs: list[float]
    is_best: list[bool]


@torch.no_grad()
def forced(checkpoint: Checkpoint, pairs: Sequence[Pair]) -> list[Forced]:
    """Return the log-probabilities of the target of each pair; all pairs must be within the model's lengths."""
    tokenizer = checkpoint.tokenizer
    sources = tokenizer.encode_batch([source for source, _ in pairs])
    targets = tokenizer.encode_batch([target for _, target in pairs])
    examples = [
        Example(source=[*source, tokenizer.eos_id], target=target)
        for source, target in zip(sources, targets, strict=True)
    ]
    found: list[Forced] = []
    for start in range(0, len(examples), _ROWS):
        found += _of_batch(checkpoint, examples[start : start + _ROWS])
    return found


def _of_batch(checkpoint: Checkpoint, examples: Sequence[Example]) -> list[Forced]:
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
