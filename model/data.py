"""Sentence pairs as tensors: tokenised and batched by tokens.

Knows token ids; nothing of files, models or devices.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.model.corpus import Pair
from antiphon.model.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Token ids of one pair: source with end token, target without begin or end tokens."""

    source: list[int]
    target: list[int]


def encode_pairs(pairs: Sequence[Pair], tokenizer: Tokenizer, *, max_source: int, max_target: int) -> list[Example]:
    """Tokenise; pairs that are empty or longer than the model's limits (in tokens, ends included) are left out."""
    sources = tokenizer.encode_batch([source for source, _ in pairs])
    targets = tokenizer.encode_batch([target for _, target in pairs])
    return [
        Example(source=[*source, tokenizer.eos_id], target=target)
        for source, target in zip(sources, targets, strict=True)
        if source and target and len(source) < max_source and len(target) < max_target
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Padded tensors. source [B, S], source_lens [B] int32; inputs and labels [B, T], label -100 where padded."""

    source: Tensor
    source_lens: Tensor
    inputs: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""
        moved = (t.to(device) for t in (self.source, self.source_lens, self.inputs, self.labels))
        source, source_lens, inputs, labels = moved
        return Batch(source=source, source_lens=source_lens, inputs=inputs, labels=labels)


IGNORED_LABEL = -100


def collate(examples: Sequence[Example], tokenizer: Tokenizer) -> Batch:
    """Pad examples to one batch; decoder inputs begin with the begin token, labels end with the end token."""
    rows = len(examples)
    source_lens = torch.tensor([len(e.source) for e in examples], dtype=torch.int32)
    target_len = max(len(e.target) for e in examples) + 1
    source = torch.full((rows, int(source_lens.max())), tokenizer.pad_id)
    inputs = torch.full((rows, target_len), tokenizer.pad_id)
    labels = torch.full((rows, target_len), IGNORED_LABEL)
    for row, example in enumerate(examples):
        target = torch.tensor(example.target)
        source[row, : len(example.source)] = torch.tensor(example.source)
        inputs[row, 0] = tokenizer.bos_id
        inputs[row, 1 : len(target) + 1] = target
        labels[row, : len(target)] = target
        labels[row, len(target)] = tokenizer.eos_id
    return Batch(source=source, source_lens=source_lens, inputs=inputs, labels=labels)


def plan_batches(examples: Sequence[Example], batch_tokens: int, seed: int) -> list[list[int]]:
    """Indices of each batch of one epoch: neighbours in length, at most batch_tokens padded target tokens.

    The order is a function of the seed alone, so that a resumed run sees the batches it would have seen.
    """
    chance = random.Random(seed)
    order = list(range(len(examples)))
    chance.shuffle(order)
    order.sort(key=lambda i: (len(examples[i].target), len(examples[i].source)))
    batches: list[list[int]] = []
    current: list[int] = []
    for index in order:
        if current and (len(current) + 1) * (len(examples[index].target) + 1) > batch_tokens:
            batches.append(current)
            current = []
        current.append(index)
    batches.append(current)
    chance.shuffle(batches)
    return batches
