"""Fine-tuning with a few examples: which are chosen, and that training uses no others."""

import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.checkpoints.checkpoint import load_checkpoint
from antiphon.cli.main import main
from antiphon.training.command import with_few_examples
from antiphon.training.corpus import Labelled, Tagged, read_labelled, read_parts
from antiphon.training.fine_tune import FineTuneTask, few_examples
from antiphon.training.recipe import FineTuneRecipe, load_any_recipe
from antiphon.training.task import RunFolders
from antiphon.training.trainer import Trainer
from tests.encoder_recipes import GROUP, fine_tune_recipe, pretrained

torch.set_num_threads(1)  # arrays this small are slower with several threads

DATA = os.environ.get("ANTIPHON_DATA")
ITEMS = [Labelled(text=f"text {index}", label="abc"[(index % 10) // 4]) for index in range(200)]


@given(st.integers(1, 40), st.integers(1, 1000))
def test_labels_are_chosen_in_turn(count: int, seed: int) -> None:
    chosen = few_examples(ITEMS, count, seed)
    assert len(chosen) == count
    assert [item for item in ITEMS if item in chosen] == chosen, "the order is that of the data"
    per_label = Counter(item.label for item in chosen)
    assert max(per_label.values()) - min(per_label[label] for label in "abc") <= 1


@given(st.integers(1, 100), st.integers(101, 300), st.integers(1, 1000))
def test_few_examples_are_part_of_more(few: int, more: int, seed: int) -> None:
    smaller, larger = few_examples(ITEMS, few, seed), few_examples(ITEMS, more, seed)
    assert set(smaller) <= set(larger)
    assert len(larger) == min(more, len(ITEMS))


def test_seed_decides_which_sentences_with_tags_are_chosen() -> None:
    items = [Tagged(words=(f"word{index}",), tags=("O",)) for index in range(100)]
    first, again, other = (few_examples(items, 20, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) == 20


@pytest.mark.parametrize("task", ["classify", "tag"])
def test_training_sees_only_the_chosen_examples(tmp_path: Path, task: str) -> None:
    """Three epochs of so few examples would be fewer than min_steps; validation and test parts stay whole."""
    init = load_checkpoint(pretrained(tmp_path, max_steps=2, checkpoint_every_steps=2))
    recipe = fine_tune_recipe(tmp_path, task, max_epochs=3, min_steps=20, checkpoint_every_steps=20)
    few = with_few_examples(recipe, 5)
    assert isinstance(few, FineTuneRecipe)
    trainer = Trainer(few, tmp_path, tmp_path / "few", GROUP, init=init)
    assert isinstance(trainer.task, FineTuneTask)
    whole = FineTuneTask(recipe, RunFolders(data=tmp_path, run=tmp_path / "whole", group=GROUP, init=init))
    sizes = {part: len(items) for part, items in trainer.task.items.items()}
    assert sizes == {"train": 5, "valid": len(whole.items["valid"]), "test": len(whole.items["test"])}
    assert trainer.task.labels == whole.labels
    assert trainer.config.max_steps == 20
    seen = [len(trainer.task.batches("train", seed).plan) for seed in range(3)]
    assert sum(seen) < 20
    assert sum(len(members) for members in trainer.task.batches("train", 1).plan) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mlm-small", "--max-train-examples", "5"], "--max-train-examples needs a recipe with task classify or tag"),
        (["snips", "--max-train-examples", "0"], "--max-train-examples is 0; it must be at least 1"),
    ],
)
def test_command_refuses_examples_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["train", *arguments, "--data", str(tmp_path), "--output", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(DATA is None, reason="ANTIPHON_DATA does not name a folder with the training data")
@pytest.mark.parametrize(
    ("name", "sizes", "num_labels"),
    [("clinc150", (15000, 3000, 4500), 150), ("sst2", (6920, 872, 1821), 2)],
)
def test_recipe_reads_the_published_parts(name: str, sizes: tuple[int, int, int], num_labels: int) -> None:
    assert DATA is not None
    recipe = load_any_recipe(name)
    assert isinstance(recipe, FineTuneRecipe)
    parts = read_parts(Path(DATA), recipe.data, read_labelled)
    assert (len(parts["train"]), len(parts["valid"]), len(parts["test"])) == sizes
    for part in (parts["train"], parts["valid"], parts["test"]):
        assert len({item.label for item in part}) == num_labels
