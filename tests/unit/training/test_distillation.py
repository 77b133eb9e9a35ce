"""Distillation of a small encoder that knows an artificial language."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from antiphon.checkpoints.checkpoint import load_checkpoint
from antiphon.errors import CheckpointError, RecipeError
from antiphon.training.batches import IGNORED_LABEL, EncoderBatch
from antiphon.training.distill import DistillationLoss, DistillTask, taught_layers
from antiphon.training.recipe import Distillation, PretrainRecipe
from antiphon.training.trainer import Trainer
from antiphon.transformer.transformer import Transformer
from tests.encoder_recipes import GROUP, pretrain_recipe, pretrained

pytestmark = pytest.mark.training

torch.set_num_threads(1)  # arrays this small are slower with several threads


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretrained(tmp_path_factory.mktemp("teacher"), max_steps=150, peak_lr=1e-2, checkpoint_every_steps=150)


def student_recipe(folder: Path, changes: dict[str, object] | None = None, **train: object) -> PretrainRecipe:
    described = pretrain_recipe(folder, "byte_bpe", **train).model_dump()
    model = {**described["model"], "encoder_layers": 1, **(changes or {})}
    return PretrainRecipe.model_validate(
        {**described, "name": "student", "model": model, "next_sentences": False, "distillation": {}}
    )


def open_student(folder: Path, teacher: Path, changes: dict[str, object] | None = None, **train: object) -> Trainer:
    recipe = student_recipe(folder, changes, **train)
    return Trainer(recipe, folder, folder / "student", GROUP, teacher=load_checkpoint(teacher))


def plain_outputs(model: Transformer, batch: EncoderBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states and logits of masked tokens of a batch, computed text by text without padding."""
    states, logits = [], []
    for row, length in enumerate(batch.lens.tolist()):
        found = model.encode(batch.ids[row, None, :length], None, batch.type_ids[row, None, :length])[0]
        labelled = batch.labels["fill_mask"][row, :length] != IGNORED_LABEL
        states.append(found)
        logits.append(model.read_out("fill_mask", found[labelled]))
    return torch.cat(states), torch.cat(logits)


@pytest.mark.parametrize(
    "weights",
    [
        dict(soft=1.0, labels=0.0, cosine=0.0, temperature=3.0),
        dict(soft=0.0, labels=1.0, cosine=0.0),
        dict(soft=0.0, labels=0.0, cosine=1.0),
        dict(),
    ],
)
def test_loss_is_the_weighted_sum_of_the_paper(tmp_path: Path, teacher: Path, weights: dict[str, float]) -> None:
    trainer = open_student(tmp_path, teacher, {"dropout": 0.0})
    config, taught = Distillation(**weights), load_checkpoint(teacher)
    student = trainer.model
    batch = trainer.task.batches("train", 0)[0]
    assert isinstance(batch, EncoderBatch)
    states, logits = plain_outputs(student, batch)
    expected_states, expected_logits = plain_outputs(taught.model, batch)
    labels = torch.cat([row[row != IGNORED_LABEL] for row in batch.labels["fill_mask"]])
    soft = (expected_logits / config.temperature).softmax(dim=-1)
    entropy = -(soft * soft.log()).sum()
    cross = -(soft * (logits / config.temperature).log_softmax(dim=-1)).sum()
    cosine = 1 - (functional.normalize(states, dim=-1) * functional.normalize(expected_states, dim=-1)).sum(dim=-1)
    expected = (
        config.soft * config.temperature**2 * (cross - entropy)
        + config.labels * functional.cross_entropy(logits, labels, reduction="sum")
        + config.cosine * cosine.mean() * len(labels)
    )
    found = DistillationLoss(student, taught.model, config).train()(batch, 0.0)
    assert found.tolist() == pytest.approx([expected.item()], rel=1e-4)


def test_student_begins_with_layers_and_embeddings_of_the_teacher(tmp_path: Path, teacher: Path) -> None:
    student, taught = open_student(tmp_path, teacher).model.state_dict(), load_checkpoint(teacher).model.state_dict()
    assert not any(name.startswith("encoder.layers.1.") for name in student)
    assert not any(name.startswith("heads.next_sentence") for name in student)
    for name, weight in student.items():
        assert torch.equal(weight, taught[name]), name


@pytest.mark.parametrize(
    ("student", "teacher", "expected"),
    [(6, 12, [0, 2, 4, 6, 8, 10]), (2, 4, [0, 2]), (3, 3, [0, 1, 2]), (1, 4, [0]), (2, 3, [0, 1])],
)
def test_layers_are_taken_evenly(student: int, teacher: int, expected: list[int]) -> None:
    assert taught_layers(student, teacher) == expected


def test_student_learns_and_the_teacher_does_not_change(tmp_path: Path, teacher: Path) -> None:
    trainer = open_student(tmp_path, teacher, max_steps=40, peak_lr=5e-3, checkpoint_every_steps=10)
    before = trainer.validate()
    averaged = trainer.run()
    assert averaged is not None
    taught, whole = load_checkpoint(teacher), trainer.batch_loss
    assert isinstance(whole, DistillationLoss)
    for name, weight in taught.model.state_dict().items():
        assert torch.equal(weight, whole.teacher.state_dict()[name]), name
    assert trainer.validate() < before
    student = load_checkpoint(averaged)
    assert [head.task for head in student.config.heads] == ["fill_mask"]
    assert student.config.encoder_layers == 1
    assert student.provenance is not None
    assert student.provenance.recipe == "commands; student"


def test_student_continues_from_a_model_with_another_head(tmp_path: Path, teacher: Path) -> None:
    """The teacher itself as initial checkpoint has a head for pairs, which the student does not learn."""
    recipe, taught = student_recipe(tmp_path, {"encoder_layers": 2}, max_steps=2), load_checkpoint(teacher)
    trainer = Trainer(recipe, tmp_path, tmp_path / "student", GROUP, init=taught, teacher=load_checkpoint(teacher))
    assert isinstance(trainer.task, DistillTask)
    assert [head.task for head in trainer.task.config.heads] == ["fill_mask"]
    assert trainer.run() is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 64}, "--teacher has d_model=32; the student's model.d_model is 64"),
        ({"encoder_layers": 3}, "--teacher has 2 layers; the student's model.encoder_layers=3"),
    ],
)
def test_teacher_of_another_shape_is_refused(
    tmp_path: Path, teacher: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_student(tmp_path, teacher, changes)


def test_missing_teacher_is_named(tmp_path: Path) -> None:
    recipe = student_recipe(tmp_path, max_steps=3, checkpoint_every_steps=3)
    with pytest.raises(RecipeError, match="--teacher must name the teacher"):
        Trainer(recipe, tmp_path, tmp_path / "student", GROUP)


def test_pairs_and_distillation_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="next_sentences must be false with distillation"):
        PretrainRecipe.model_validate({**pretrain_recipe(tmp_path).model_dump(), "distillation": {}})
