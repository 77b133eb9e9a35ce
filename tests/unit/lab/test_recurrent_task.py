"""Training of the LSTM by Trainer: same batches as the Transformer, resumable, and readable checkpoints."""

import json
from pathlib import Path

import pytest
import torch

from antiphon.checkpoints.checkpoint import load_weights, read_tensors
from antiphon.errors import CheckpointError, RecipeError
from antiphon.lab.recurrent import OpenRecurrent, RecurrentTask, load_recurrent
from antiphon.training.task import RunFolders
from antiphon.training.trainer import Trainer
from antiphon.training.translation import TranslationTask
from tests.unit.lab.recurrent_models import ALONE, SHAPE, small_recipe

torch.set_num_threads(1)  # arrays this small are slower with several threads


def make_trainer(folder: Path, run: str, **train: object) -> Trainer:
    return Trainer(small_recipe(folder, **train), folder, folder / run, ALONE, open_task=OpenRecurrent(SHAPE))


def test_batches_are_those_of_the_transformer(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    lstm = RecurrentTask(recipe, RunFolders(data=tmp_path, run=tmp_path / "lstm", group=ALONE), SHAPE)
    transformer = TranslationTask(recipe, RunFolders(data=tmp_path, run=tmp_path / "transformer", group=ALONE))
    expected, found = transformer.batches("train", 7), lstm.batches("train", 7)
    assert len(expected) == len(found) > 1
    for index in range(len(expected)):
        for name in ("source", "source_lens", "inputs", "labels"):
            assert torch.equal(getattr(expected[index], name), getattr(found[index], name))


def test_stopped_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path, "whole").run()
    stopped = make_trainer(tmp_path, "stopped")
    step = stopped.train_step

    def stopped_at_9(batch: object) -> float:
        if stopped.progress.step == 9:
            raise InterruptedError
        return step(batch)  # type: ignore[arg-type]

    stopped.train_step = stopped_at_9  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        stopped.run()
    again = make_trainer(tmp_path, "stopped").run()
    assert whole is not None
    assert again is not None
    expected, found = (read_tensors(path / "model.safetensors") for path in (whole, again))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_training_lowers_the_loss_and_its_checkpoint_is_read_back(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "run", max_steps=40, checkpoint_every_steps=40)
    before = trainer.validate()
    averaged = trainer.run()
    assert averaged is not None
    assert trainer.validate() < before - 0.5
    model = load_recurrent(averaged)
    assert model.config == trainer.task.config
    assert not model.training
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_damaged_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    averaged = make_trainer(tmp_path, "run", max_steps=1).run()
    assert averaged is not None
    config = averaged / "config.json"
    described = json.loads(config.read_text())
    config.write_text(json.dumps(described | {"version": 9}))
    with pytest.raises(CheckpointError, match=r"config\.json: version is 9, expected 1"):
        load_recurrent(averaged)
    described["model"]["d_model"] = 15
    config.write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=r"config\.json: d_model"):
        load_recurrent(averaged)
    config.unlink()
    with pytest.raises(CheckpointError, match=r"averaged is not a checkpoint: config\.json is missing"):
        load_recurrent(averaged)


def test_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    averaged = make_trainer(tmp_path, "run", max_steps=1).run()
    assert averaged is not None
    other = Trainer(
        small_recipe(tmp_path), tmp_path, tmp_path / "wide", ALONE, open_task=OpenRecurrent(SHAPE | {"d_model": 48})
    )
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .* has shape"):
        load_weights(other.model, averaged / "model.safetensors")


def test_wrong_field_of_the_shape_is_named(tmp_path: Path) -> None:
    folders = RunFolders(data=tmp_path, run=tmp_path / "run", group=ALONE)
    with pytest.raises(RecipeError, match="LSTM: d_model"):
        RecurrentTask(small_recipe(tmp_path), folders, {"d_model": 15})
