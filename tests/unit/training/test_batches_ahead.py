"""A process beside the training makes the batches that the training process would make."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from antiphon.training.recipe import Augmentation, Recipe
from antiphon.training.task import Group, RunFolders
from antiphon.training.trainer import Place, batches_beside, batches_from, open_task
from tests.unit.training.test_train import make_recipe


def taken(batches: Iterator[tuple[Place, Any]], count: int) -> list[tuple[Place, list[list[list[int]]]]]:
    """Return places and tensors of the first batches."""
    found = islice(batches, count)
    return [(place, [part.tolist() for part in (b.source, b.inputs, b.labels)]) for place, b in found]


def augmented(folder: Path) -> Recipe:
    return make_recipe(folder).model_copy(update={"augmentation": Augmentation(joined=0.5, lower_case=0.5)})


def test_a_process_beside_makes_the_same_batches_across_epochs(tmp_path: Path) -> None:
    recipe, group = augmented(tmp_path), Group(rank=0, size=1, device=torch.device("cpu"))
    folders = RunFolders(data=tmp_path, run=tmp_path / "run", group=group)
    task = open_task(recipe, folders)
    per_epoch = len(task.batches("train", recipe.train.seed * 1_000_003))
    start = Place(epoch=0, batch=per_epoch - 3)

    expected = taken(batches_from(task, start, folders, recipe.train.seed), 8)
    found = taken(batches_beside(open_task, recipe, folders, start), 8)

    assert found == expected
    assert [place.epoch for place, _ in found[:4]] == [0, 0, 0, 1]
    assert found[3][0] == Place(epoch=1, batch=1)


def test_the_processes_of_a_group_share_the_batches_of_an_epoch(tmp_path: Path) -> None:
    recipe, device = augmented(tmp_path), torch.device("cpu")
    alone, *pair = (
        RunFolders(data=tmp_path, run=tmp_path / "run", group=Group(rank=rank, size=size, device=device))
        for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    task, start = open_task(recipe, alone), Place(epoch=0, batch=0)
    whole = taken(batches_from(task, start, alone, recipe.train.seed), 8)
    first, second = (taken(batches_from(task, start, folders, recipe.train.seed), 4) for folders in pair)
    assert [batch for _, batch in first] == [batch for _, batch in whole[::2]]
    assert [batch for _, batch in second] == [batch for _, batch in whole[1::2]]
