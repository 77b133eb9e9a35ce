"""Trial: one training run of an experiment, with its figures. A killed trial is resumed, a finished one is read.

The names of runs and results have fingerprints of their recipes, so those of other settings are never mixed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from antiphon.bundle.machine import processor_name
from antiphon.checkpoints.checkpoint import load_checkpoint
from antiphon.errors import TrainingDiverged
from antiphon.training.recipe import DataConfig, FineTuneRecipe, PretrainRecipe, Recipe
from antiphon.training.task import Group, RunFolders, TrainingTask
from antiphon.training.trainer import Trainer, open_task


def machine() -> str:
    """Return processor, number of cores, version of torch, and whether products in bfloat16 are computed as such."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{processor_name()}, {os.cpu_count()} cores"
    return f"{name}, torch {torch.__version__}, bfloat16 {'in hardware' if Group.join().computes_bf16 else 'off'}"


Figures = dict[str, Any]
"""Measured values by name, as JSON can hold them."""

TRAINED_NAME = "trained.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One training run: the name of its setting in the experiment, its recipe with the seed, and the data folder.

    teacher: run whose model this one learns from, for a recipe with distillation. open_task: task of the recipe, see
    Trainer. tasks: recipes with which the trained encoder is fine-tuned for its figures.
    """

    name: str
    recipe: Recipe | PretrainRecipe
    data: Path
    teacher: Trial | None = None
    open_task: Callable[[Any, RunFolders], TrainingTask[Any]] = open_task
    tasks: tuple[FineTuneRecipe, ...] = ()

    @property
    def seed(self) -> int:
        """Seed of weights, batches and dropout."""
        return self.recipe.train.seed

    @property
    def pairs(self) -> DataConfig:
        """Sentence pairs of a translation recipe. Raises TypeError for a recipe of another task."""
        if not isinstance(self.recipe, Recipe):
            raise TypeError(f"trial {self.name!r}: recipe {self.recipe.name!r} has task {self.recipe.task!r}, no pairs")
        return self.recipe.data

    @property
    def key(self) -> str:
        """Name of the run folder: trials with the same recipe share one run. Fields with defaults do not count."""
        task = getattr(self.open_task, "__module__", "") if self.open_task is open_task else repr(self.open_task)
        described = f"{self.recipe.model_dump_json(exclude_defaults=True)}|{task}"
        if self.teacher is not None:
            described += f"|{self.teacher.key}"
        return f"{self.recipe.name}.s{self.seed}.{_fingerprint(described)}"

    @property
    def result_name(self) -> str:
        """Name of the result's file. A trial with changed tasks has the same run and another result."""
        parts = [self.name.replace(" ", "-"), self.key]
        if self.tasks:
            parts.append(_fingerprint("|".join(task.model_dump_json(exclude_defaults=True) for task in self.tasks)))
        return ".".join([*parts, "json"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Figures of a finished trial.

    diverged: message of a training run whose loss was not finite; its figures are empty.
    curve: records of metrics.jsonl without times. machine: where it was trained.
    """

    name: str
    seed: int
    figures: Figures
    curve: list[Figures]
    train_s: float
    machine: str
    diverged: str | None = None


Measure = Callable[[Trial, Path], Figures]
"""Returns the figures of a finished training run, from its averaged checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Folders:
    """Folder of training runs, which experiments share, and of the results of one experiment."""

    runs: Path
    results: Path


def run_trial(trial: Trial, folders: Folders, measure: Measure) -> Result:
    """Train and measure, or read the run or the result that is there already."""
    path = folders.results / trial.result_name
    if not path.is_file():
        run = folders.runs / trial.key
        trained = train(trial, run)
        figures = {} if trained["diverged"] else measure(trial, run / "averaged")
        result = Result(name=trial.name, seed=trial.seed, figures=figures, curve=_curve(run), **trained)
        _write(path, {name: getattr(result, name) for name in Result.__slots__})
    return Result(**json.loads(path.read_text(encoding="utf-8")))


def train(trial: Trial, run: Path) -> dict[str, Any]:
    """Train a trial in its run folder, or resume it; return train_s, machine and diverged of its Result.

    The teacher's run must be finished, in a folder beside this one. Raises CheckpointError if it is not there.
    """
    path = run / TRAINED_NAME
    if not path.is_file():
        started_s = time.monotonic()
        run.mkdir(parents=True, exist_ok=True)
        diverged = None
        teacher = None if trial.teacher is None else load_checkpoint(run.with_name(trial.teacher.key) / "averaged")
        try:
            Trainer(trial.recipe, trial.data, run, Group.join(), teacher=teacher, open_task=trial.open_task).run()
        except TrainingDiverged as error:
            diverged = str(error)
        _write(path, {"train_s": time.monotonic() - started_s, "diverged": diverged, "machine": machine()})
        shutil.rmtree(run / "checkpoints", ignore_errors=True)  # a finished run needs only its averaged weights
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _write(path: Path, described: Figures) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(described) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _curve(folder: Path) -> list[Figures]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return []
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    # A run that was killed between a checkpoint and its record, or after both, can have a step twice.
    by_step = {record["step"]: {key: value for key, value in record.items() if key != "time"} for record in records}
    return [by_step[step] for step in sorted(by_step)]


def _fingerprint(described: str) -> str:
    return hashlib.sha256(described.encode()).hexdigest()[:8]
