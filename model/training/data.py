"""Sentence pairs as tensors: tokenised and batched by tokens.

Knows token ids; nothing of files, models or devices.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from antiphon.model.text.tokenizer import Tokenizer
from antiphon.model.training.corpus import Pair


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

    @property
    def counts(self) -> Tensor:
        """Labels, [1] float64."""
        return (self.labels != IGNORED_LABEL).sum()[None].double()

    def within(self, max_source: int, max_target: int) -> Batch:
        """The same batch without columns beyond these lengths, which are padding where the examples keep to them."""
        return Batch(
            source=self.source[:, :max_source],
            source_lens=self.source_lens,
            inputs=self.inputs[:, :max_target],
            labels=self.labels[:, :max_target],
        )


IGNORED_LABEL = -100

# oneDNN compiles a kernel for every new shape of a product. With lengths as they come each batch has new shapes, and a
# step took 4.2 s of which 3.7 s were spent compiling; with a few dozen shapes it compiles them once.
LENGTH_STEP = 4


def rounded(length: int) -> int:
    """A length as batches have it."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def collate(examples: Sequence[Example], tokenizer: Tokenizer, rows: int | None = None) -> Batch:
    """Pad examples to one batch; decoder inputs begin with the begin token, labels end with the end token.

    Lengths are rounded up to LENGTH_STEP. Where there are fewer examples than `rows`, rows without labels follow.
    """
    rows = rows or len(examples)
    source_lens = torch.ones(rows, dtype=torch.int32)
    source_lens[: len(examples)] = torch.tensor([len(e.source) for e in examples], dtype=torch.int32)
    source = torch.full((rows, rounded(int(source_lens.max()))), tokenizer.pad_id)
    target_len = rounded(max(len(e.target) for e in examples) + 1)
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


def rows_of(target_len: int, batch_tokens: int) -> int:
    """Rows of every batch whose targets, end token included, have this length: at least one."""
    return max(1, batch_tokens // rounded(target_len))


def plan_batches(examples: Sequence[Example], batch_tokens: int, seed: int) -> list[list[int]]:
    """Indices of each batch of one epoch: neighbours in length, at most batch_tokens padded target tokens."""
    return plan_lengths([(len(e.target) + 1, len(e.source)) for e in examples], batch_tokens, seed)


def plan_lengths(lengths: Sequence[tuple[int, int]], batch_tokens: int, seed: int) -> list[list[int]]:
    """Indices of each batch of one epoch of examples with these lengths, the second of which only orders neighbours.

    The order is a function of the seed alone, so that a resumed run sees the batches it would have seen.
    """
    chance = random.Random(seed)
    order = list(range(len(lengths)))
    chance.shuffle(order)
    order.sort(key=lambda i: (rounded(lengths[i][0]), lengths[i][1]))
    batches: list[list[int]] = []
    for length, group in groupby(order, key=lambda i: rounded(lengths[i][0])):
        members = list(group)
        rows = rows_of(length, batch_tokens)
        batches += [members[start : start + rows] for start in range(0, len(members), rows)]
    chance.shuffle(batches)
    return batches
