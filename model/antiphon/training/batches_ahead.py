"""Batches of a run in the order of training, made by the training process itself or by a process beside it.

On a GPU a step takes tens of milliseconds, so tokenising an epoch and padding batches would take as long as the steps.
On a CPU a process beside the training would take the cores away from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from antiphon.training.recipe import AnyRecipe
from antiphon.training.tasks.training_task import AnyBatch, RunFolders, TrainingTask

OpenTask = Callable[[Any, RunFolders], TrainingTask[Any]]
_NUM_WAITING = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Place in a run: epoch, and batch of that epoch for every process of the group."""

    epoch: int
    batch: int


def batches_from(task: TrainingTask[Any], place: Place, folders: RunFolders, seed: int) -> Iterator[tuple[Place, Any]]:
    """Yield the training batches of this process from a place on, without end, each with the place behind it."""
    group, epoch, first = folders.group, place.epoch, place.batch
    while True:
        batches = task.batches("train", seed * 1_000_003 + epoch)
        for index in range(first, len(batches) // group.size):
            yield Place(epoch=epoch, batch=index + 1), batches[index * group.size + group.rank]
        epoch, first = epoch + 1, 0


def batches_beside(
    open_task: OpenTask, recipe: AnyRecipe, folders: RunFolders, place: Place
) -> Iterator[tuple[Place, AnyBatch]]:
    """Yield what `batches_from` yields, from a process that opens the recipe's task too and stays 64 batches ahead."""
    # The process never uses the GPU: a CUDA context would take memory there.
    beside = replace(folders, group=replace(folders.group, device=torch.device("cpu")))
    stream = _Stream(open_task, recipe, beside, place)
    # Spawned: a forked process could use neither CUDA nor the threads of the tokenizer.
    loader: DataLoader[Any] = DataLoader(
        stream, batch_size=None, num_workers=1, prefetch_factor=_NUM_WAITING, multiprocessing_context="spawn"
    )
    yield from loader


class _Stream(IterableDataset[Any]):
    def __init__(self, open_task: OpenTask, recipe: AnyRecipe, folders: RunFolders, place: Place) -> None:
        self._open_task = open_task
        self._recipe = recipe
        self._folders = folders
        self._place = place

    def __iter__(self) -> Iterator[tuple[Place, Any]]:
        task = self._open_task(self._recipe, self._folders)
        return batches_from(task, self._place, self._folders, self._recipe.train.seed)
