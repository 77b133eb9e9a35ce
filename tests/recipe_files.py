"""Recipes as TOML files, and runs of them that are killed and compared."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.checkpoints.checkpoint import read_tensors
from antiphon.training.recipe import AnyRecipe
from antiphon.training.trainer import Trainer


class Killed(Exception):
    """Simulation of SIGKILL: training stops between two statements without any clean-up."""


@contextlib.contextmanager
def killed_at(step: int) -> Iterator[None]:
    """Kill the training in the context at a step."""
    train_step = Trainer.train_step

    def killed(trainer: Trainer, batch: Any) -> float:
        if trainer.progress.step == step:
            raise Killed
        return train_step(trainer, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", killed)
        with pytest.raises(Killed):
            yield


def check_equal_weights(*checkpoints: Path) -> None:
    """Check that two checkpoints have the same weights, bit by bit."""
    expected, found = (read_tensors(path / "model.safetensors") for path in checkpoints)
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


def write_recipe(recipe: AnyRecipe, path: Path) -> str:
    """Write a recipe as a TOML file, whose path is returned; its values have the same notation in JSON and TOML."""

    def inline(value: object) -> str:
        if isinstance(value, dict):
            return f"{{ {', '.join(f'{key} = {inline(one)}' for key, one in value.items())} }}"
        return f"[{', '.join(map(inline, value))}]" if isinstance(value, list) else json.dumps(value)

    held = recipe.model_dump(mode="json", exclude_none=True)
    path.write_text("".join(f"{key} = {inline(value)}\n" for key, value in held.items()), encoding="utf-8")
    return str(path)
