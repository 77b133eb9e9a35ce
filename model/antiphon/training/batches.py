"""Batches of padded tensors: planning by length, targets of decoders, and examples of encoders with their labels."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from antiphon.architecture.heads import FIRST_TOKEN_TASKS, Task

IGNORED_LABEL = -100

# oneDNN compiles a kernel for every new shape of a matrix product. Without rounding each batch has new shapes, and a
# step took 4.2 s, of which 3.7 s were compilation. With a few dozen shapes each is compiled once.
LENGTH_STEP = 4


def rounded(length: int) -> int:
    """Return a length rounded up to a multiple of LENGTH_STEP."""
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def rows_of(target_len: int, batch_tokens: int) -> int:
    """Return the number of rows of a batch with this target length (with end token): at least one."""
    return max(1, batch_tokens // rounded(target_len))


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


Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class PlannedBatches(Generic[Made]):
    """Batches of one epoch. plan: examples of each batch. make: returns the batch with an index of the plan."""

    plan: list[list[int]]
    make: Callable[[int], Made]

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Made:
        return self.make(index)

    def __iter__(self) -> Iterator[Made]:
        return map(self.make, range(len(self.plan)))


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetBatch:
    """Inputs of a decoder and their labels, [B, T] int64: a label is the token after its input.

    Labels of padding, and those beyond the end of a text, are IGNORED_LABEL.
    """

    inputs: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Self:
        """Return the batch on a device."""
        return replace(self, **{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    @property
    def counts(self) -> Tensor:
        """Number of labels, [1] float64."""
        return (self.labels != IGNORED_LABEL).sum()[None].double()


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderExample:
    """Token ids of a text or pair with its special tokens, and the labels of each task.

    labels: one label, or one for each token. A task that is not in `labels` does not learn from the example.
    """

    ids: Sequence[int]
    type_ids: Sequence[int]
    labels: Mapping[Task, int | list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderBatch:
    """Padded tensors: ids, type_ids [B, S] int64, lens [B] int32.

    labels: for each task [B] or [B, S] int64; IGNORED_LABEL where there is no label.
    """

    ids: Tensor
    type_ids: Tensor
    lens: Tensor
    labels: dict[Task, Tensor]

    def to(self, device: torch.device) -> EncoderBatch:
        """Return the batch on a device."""
        return replace(
            self,
            ids=self.ids.to(device),
            type_ids=self.type_ids.to(device),
            lens=self.lens.to(device),
            labels={task: labels.to(device) for task, labels in self.labels.items()},
        )

    @property
    def counts(self) -> Tensor:
        """Number of labels of each of K tasks, [K] float64."""
        return torch.stack([(labels != IGNORED_LABEL).sum() for labels in self.labels.values()]).double()


def collate(
    examples: Sequence[EncoderExample], tasks: Sequence[Task], pad_id: int, batch_tokens: int, max_len: int
) -> EncoderBatch:
    """Pad the examples of one planned batch.

    Lengths and rows are rounded up, so that there are few different shapes. Added rows have no labels. max_len limits
    the length, in tokens.
    """
    longest = max(len(example.ids) for example in examples)
    rows, length = max(len(examples), rows_of(longest, batch_tokens)), min(rounded(longest), max_len)
    ids, type_ids = torch.full((rows, length), pad_id), torch.zeros((rows, length), dtype=torch.int64)
    lens = torch.ones(rows, dtype=torch.int32)
    labels = {
        task: torch.full((rows,) if task in FIRST_TOKEN_TASKS else (rows, length), IGNORED_LABEL) for task in tasks
    }
    for row, example in enumerate(examples):
        lens[row] = len(example.ids)
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        type_ids[row, : len(example.ids)] = torch.tensor(example.type_ids)
        for task, label in example.labels.items():
            if isinstance(label, int):
                labels[task][row] = label
            else:
                labels[task][row, : len(label)] = torch.tensor(label)
    return EncoderBatch(ids=ids, type_ids=type_ids, lens=lens, labels=labels)
