"""Trials: finished ones are read, killed ones resumed, results depend on the seed only; every experiment runs."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from antiphon.checkpoints.checkpoint import load_checkpoint
from antiphon.cli.main import main
from antiphon.lab import trial as trials
from antiphon.lab.command import EXPERIMENTS
from antiphon.lab.experiment import Experiment, Setting, run_trials
from antiphon.lab.experiments.ablations import measure
from antiphon.lab.experiments.encoders import BERT, COMPARE, COUNTS, STUDENT, TRANSFER, TRANSFER_TASKS
from antiphon.lab.trial import Figures, Folders, Trial, run_trial
from antiphon.training.recipe import load_any_recipe
from tests.integration.process import environment
from tests.unit.lab.recurrent_models import toy_setting, toy_trial

pytestmark = pytest.mark.training


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Train with one thread, as the killed process does: sums of several differ, and other tests leave their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def folders(output: Path) -> Folders:
    return toy_setting(output).folders("example")


def parameters(setting: Setting, trial: Trial, averaged: Path) -> Figures:
    from antiphon.checkpoints.checkpoint import read_tensors

    weights = read_tensors(averaged / "model.safetensors")
    return {name: weight.double().sum().item() for name, weight in weights.items()}


def experiment(name: str, *own: Trial) -> Experiment:
    return Experiment(
        name=name, question="Does it run?", trials=lambda _: own, measure=parameters, columns={},
        claims=lambda _: (), draw=lambda *_: None,
    )  # fmt: skip


def test_finished_trial_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = toy_trial(tmp_path)
    first = run_trial(trial, folders(tmp_path), partial(measure, toy_setting(tmp_path)))
    monkeypatch.setattr(trials, "Trainer", None)
    assert run_trial(trial, folders(tmp_path), partial(measure, toy_setting(tmp_path))) == first
    assert first.diverged is None
    assert [record["step"] for record in first.curve] == [6, 12]
    assert not (tmp_path / "runs" / trial.key / "checkpoints").exists(), "checkpoints of finished trials fill the disk"


KILLED = """
import os, signal, sys
from functools import partial
from pathlib import Path
import torch
torch.set_num_threads(1)
from antiphon.lab.trial import run_trial
from antiphon.training.trainer import Trainer
from tests.unit.lab.recurrent_models import toy_setting, toy_trial
from tests.unit.lab.test_trial import folders, parameters

folder = Path(sys.argv[1])
step = Trainer.train_step
def killed(trainer, batch):
    if trainer.progress.step == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(trainer, batch)
Trainer.train_step = killed
trial = toy_trial(folder)
run_trial(trial, folders(folder), partial(parameters, toy_setting(folder)))
"""


def test_trial_that_was_killed_gives_the_result_of_an_uninterrupted_one(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(killed)]
    root = str(Path(__file__).parents[3])
    ended = subprocess.run(command, env={**environment(), "PYTHONPATH": os.pathsep.join([root])}, check=False)
    assert ended.returncode == -signal.SIGKILL
    trial = toy_trial(killed)
    assert (killed / "runs" / trial.key / "checkpoints").is_dir(), "it must have been killed after its first checkpoint"
    resumed = run_trial(trial, folders(killed), partial(parameters, toy_setting(killed)))
    whole = toy_trial(tmp_path / "whole")
    uninterrupted = run_trial(whole, folders(tmp_path / "whole"), partial(parameters, toy_setting(tmp_path)))
    assert resumed.figures == uninterrupted.figures
    assert resumed.curve == uninterrupted.curve


def test_results_depend_on_the_seed_and_not_on_the_number_of_jobs(tmp_path: Path) -> None:
    def results(folder: str, jobs: int) -> dict[int, Figures]:
        setting = toy_setting(tmp_path / folder, seeds=(1, 2))
        own = [toy_trial(tmp_path / folder, seed=seed) for seed in (1, 2)]
        found = run_trials(experiment("seeds", *own), setting, jobs)
        return {result.seed: result.figures for result in found.trials["small"]}

    alone = results("alone", 1)
    assert results("together", 2) == alone
    assert alone[1] != alone[2]


def test_trial_whose_loss_is_not_finite_has_a_message_and_no_figures(tmp_path: Path) -> None:
    trial = toy_trial(tmp_path, peak_lr=1e30, warmup_steps=1)
    result = run_trial(trial, folders(tmp_path), partial(measure, toy_setting(tmp_path)))
    assert result.figures == {}
    assert result.diverged is not None
    assert "train.peak_lr" in result.diverged
    assert json.loads((tmp_path / "runs" / trial.key / "trained.json").read_text())["diverged"] == result.diverged


def test_trials_of_other_recipes_have_other_folders(tmp_path: Path) -> None:
    keys = {toy_trial(tmp_path, **settings).key for settings in ({}, {"warmup_steps": 7}, {"bf16": False})}
    assert len(keys) == 3


def test_student_is_trained_after_its_teacher_and_from_its_weights(tmp_path: Path) -> None:
    setting = toy_setting(tmp_path)
    trials_of_seed = {trial.name: trial for trial in COMPARE.trials(setting)}
    student, teacher = trials_of_seed[STUDENT], trials_of_seed[BERT]
    assert student.teacher == teacher
    assert replace(student, teacher=None).key != student.key, "another teacher is another run"
    found = run_trials(experiment("students", student, teacher), setting, jobs=2)
    assert set(found.trials) == {STUDENT, BERT}
    averaged = tmp_path / "runs" / student.key / "averaged"
    assert (
        load_checkpoint(averaged).config.encoder_layers
        == load_checkpoint(tmp_path / "runs" / teacher.key / "averaged").config.encoder_layers // 2
    )


def test_rows_of_a_seed_share_one_encoder_of_bert_small(tmp_path: Path) -> None:
    trials = TRANSFER.trials(Setting(data=tmp_path, output=tmp_path, seeds=(1, 2)))
    assert len(trials) == 2 * len(TRANSFER_TASKS) * len(COUNTS)
    assert len({trial.key for trial in trials}) == 2
    assert all(trial.recipe == load_any_recipe("bert-small") for trial in trials if trial.seed == 1)
    assert {trial.data for trial in trials} == {tmp_path}


def test_scale_changes_the_steps_of_warm_up_and_training(tmp_path: Path) -> None:
    whole, half = (
        TRANSFER.trials(Setting(data=tmp_path, output=tmp_path, scale=scale, seeds=(1,)))[0].recipe.train
        for scale in (1.0, 0.5)
    )
    assert (2 * half.max_steps, 2 * half.warmup_steps) == (whole.max_steps, whole.warmup_steps)


def test_rows_of_a_changed_task_have_the_same_run_and_another_result(tmp_path: Path) -> None:
    trial = TRANSFER.trials(Setting(data=tmp_path, output=tmp_path, seeds=(1,)))[0]
    (task,) = trial.tasks
    train = task.train.model_copy(update={"peak_lr": 1e-5})
    changed = replace(trial, tasks=(task.model_copy(update={"train": train}),))
    assert changed.key == trial.key
    assert changed.result_name != trial.result_name


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_runs_at_toy_size(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = EXPERIMENTS[name]
    assert main(["lab", name, "--scale", "toy", "--seeds", "1", "--jobs", "1", "--output", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert experiment.question in page
    assert page.startswith((tmp_path / "RESULTS.md").read_text().partition("\n\n")[2])
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(found["trials"]) == len(experiment.trials(toy_setting(tmp_path))) > 0
    shown = {figure for figure in experiment.columns for trial in found["trials"] if figure in trial["figures"]}
    assert shown == set(experiment.columns), "every column has a value in some row"
    assert all(claim["source"] and claim["measured"] for claim in found["claims"])


def test_compare_is_a_command_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--scale", "1"]) == 2
    assert "--data is missing" in capsys.readouterr().err
