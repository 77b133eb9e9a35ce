"""Trial: one training run of an experiment, with its figures. A killed trial is resumed, a finished one is read.

A folder's name has a fingerprint of recipe and code of the measurement, so results of other settings are never mixed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.model.training.group import Group
from antiphon.model.training.recipe import Recipe
from antiphon.model.training.tasks.training_task import RunFolders, TrainingTask
from antiphon.model.training.train import Trainer, TrainingDiverged, open_task

Figures = dict[str, Any]
"""Measured values by name, as JSON can hold them."""

RESULT_NAME = "result.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One training run: the name of its setting in the experiment, its recipe with the seed, and the data folder.

    init: checkpoint to start from, see `antiphon train --init`.
    """

    name: str
    recipe: Recipe
    data: Path
    open_task: Callable[[Any, RunFolders], TrainingTask[Any]] = open_task

    @property
    def seed(self) -> int:
        """Seed of weights, batches and dropout."""
        return self.recipe.train.seed

    @property
    def key(self) -> str:
        """Name of the run folder."""
        described = f"{self.recipe.model_dump_json()}|{self.open_task.__module__}"
        return f"{self.name}.s{self.seed}.{hashlib.sha256(described.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Figures of a finished trial.

    diverged: message of a training run whose loss was not finite; its figures are empty.
    curve: records of metrics.jsonl without times.
    """

    name: str
    seed: int
    figures: Figures
    curve: list[Figures]
    train_s: float
    diverged: str | None = None


Measure = Callable[[Trial, Path], Figures]
"""Returns the figures of a finished training run, from its averaged checkpoint."""


def run_trial(trial: Trial, folder: Path, measure: Measure) -> Result:
    """Train and measure in `folder`, or read the result that is there already."""
    finished = folder / RESULT_NAME
    if not finished.is_file():
        result = _train_and_measure(trial, folder, measure)
        unfinished = finished.with_suffix(".tmp")
        unfinished.write_text(json.dumps(_described(result)) + "\n", encoding="utf-8")
        unfinished.replace(finished)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return Result(**json.loads(finished.read_text(encoding="utf-8")))


def _train_and_measure(trial: Trial, folder: Path, measure: Measure) -> Result:
    started_s = time.monotonic()
    figures: Figures = {}
    diverged = None
    folder.mkdir(parents=True, exist_ok=True)
    try:
        averaged = Trainer(trial.recipe, trial.data, folder, Group.join(), open_task=trial.open_task).run()
        train_s = time.monotonic() - started_s
        assert averaged is not None
        figures = measure(trial, averaged)
    except TrainingDiverged as error:
        train_s = time.monotonic() - started_s
        diverged = str(error)
    return Result(
        name=trial.name, seed=trial.seed, figures=figures, curve=_curve(folder), train_s=train_s, diverged=diverged
    )


def _curve(folder: Path) -> list[Figures]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    # A run that was killed between a checkpoint and its record, or after both, can have a step twice.
    by_step = {record["step"]: {key: value for key, value in record.items() if key != "time"} for record in records}
    return [by_step[step] for step in sorted(by_step)]


def _described(result: Result) -> dict[str, Any]:
    return {name: getattr(result, name) for name in Result.__slots__}
