"""Trials of the experiment `transfer` at full size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from antiphon.lab.experiment import Setting
from antiphon.lab.experiments.encoders import COUNTS, TRANSFER, TRANSFER_TASKS
from antiphon.training.recipe import load_any_recipe


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
