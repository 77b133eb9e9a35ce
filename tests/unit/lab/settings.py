"""Toy settings and one small trial of the laboratory, for tests."""

from __future__ import annotations

from pathlib import Path

from antiphon.lab.experiment import Setting
from antiphon.lab.experiments.ablations import trials_of
from antiphon.lab.trial import Trial


def toy_setting(folder: Path, seeds: tuple[int, ...] = (1,)) -> Setting:
    return Setting(data=None, output=folder, scale=None, seeds=seeds)


def toy_trial(folder: Path, name: str = "small", seed: int = 1, **train: object) -> Trial:
    changed = {"checkpoint_every_steps": 6, **train}
    (trial,) = trials_of(toy_setting(folder, (seed,)), {name: ({}, changed)}, steps=1)
    return trial
