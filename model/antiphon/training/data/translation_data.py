"""Sentence pairs as tensors: tokenisation, and batches with a limited number of tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from antiphon.text.tokenizer import Tokenizer
from antiphon.training.data.corpus import Pair


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Token ids of one pair: source with end token, target without begin and end tokens."""

    source: list[int]
    target: list[int]


def encode_pairs(pairs: Sequence[Pair], tokenizer: Tokenizer, *, max_source: int, max_target: int) -> list[Example]:
    """Tokenise pairs; empty ones and those beyond max_source or max_target tokens (with end token) are left out."""
    sources = tokenizer.encode_batch([source for source, _ in pairs])
    targets = tokenizer.encode_batch([target for _, target in pairs])
    return [
        Example(source=[*source, tokenizer.eos_id], target=target)
        for source, target in zip(sources, targets, strict=True)
        if source and target and len(source) < max_source and len(target) < max_target
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Padded tensors: source [B, S] int64, source_lens [B] int32, inputs and labels [B, T] int64.

    Labels of padding are IGNORED_LABEL.
    """

    source: Tensor
    source_lens: Tensor
    inputs: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        moved = (t.to(device) for t in (self.source, self.source_lens, self.inputs, self.labels))
        source, source_lens, inputs, labels = moved
        return Batch(source=source, source_lens=source_lens, inputs=inputs, labels=labels)

    @property
    def counts(self) -> Tensor:
        """Number of labels, [1] float64."""
        return (self.labels != IGNORED_LABEL).sum()[None].double()

    def within(self, max_source: int, max_target: int) -> Batch:
        """Return the batch without columns beyond these lengths; they are padding if no example is longer."""
        return Batch(
            source=self.source[:, :max_source],
            source_lens=self.source_lens,
            inputs=self.inputs[:, :max_target],
            labels=self.labels[:, :max_target],
        )


IGNORED_LABEL = -100

# oneDNN compiles a kernel for every new shape of a matrix product. Without rounding each batch has new shapes, and a
# step took 4.2 s, of which 3.7 s were compilation. With a few dozen shapes each is compiled once.
LENGTH_STEP = 4


def rounded(length: int) -> int:
    """Return a length rounded up to a multiple of LENGTH_STEP."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def collate(examples: Sequence[Example], tokenizer: Tokenizer, rows: int | None = None) -> Batch:
    """Pad examples to one batch; decoder inputs start with the begin token, labels end with the end token.

    Lengths are rounded up to LENGTH_STEP. If there are fewer examples than `rows`, rows without labels are added.
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
    """Return the number of rows of a batch with this target length (with end token): at least one."""
    return max(1, batch_tokens // rounded(target_len))


def plan_batches(examples: Sequence[Example], batch_tokens: int, seed: int) -> list[list[int]]:
    """Return the indices of each batch of one epoch: similar lengths, at most batch_tokens padded target tokens."""
    return plan_lengths([(len(e.target) + 1, len(e.source)) for e in examples], batch_tokens, seed)


def plan_lengths(lengths: Sequence[tuple[int, int]], batch_tokens: int, seed: int) -> list[list[int]]:
    """Return the indices of each batch of one epoch, for examples with these lengths.

    lengths: the first length limits the rows of a batch; the second one only sorts examples with equal first length.
    The result depends only on lengths and seed, so a resumed run gets the same batches.
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
