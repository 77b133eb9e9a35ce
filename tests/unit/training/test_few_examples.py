"""Fine-tuning with a few examples, of which training uses no others, and F1 of spans."""

import os
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from antiphon.checkpoints.checkpoint import load_checkpoint
from antiphon.training.command import with_few_examples
from antiphon.training.corpus import Labelled, Tagged, read_labelled, read_parts
from antiphon.training.fine_tune import FineTuneTask, few_examples
from antiphon.training.recipe import FineTuneRecipe, load_any_recipe
from antiphon.training.scores import Span, SpanScore, span_score, spans
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


@pytest.mark.skipif(DATA is None, reason="ANTIPHON_DATA does not name a folder with the training data")
@pytest.mark.parametrize(
    ("name", "sizes", "num_labels"), [("clinc150", (15000, 3000, 4500), 150), ("sst2", (6920, 872, 1821), 2)]
)
def test_recipe_reads_the_published_parts(name: str, sizes: tuple[int, int, int], num_labels: int) -> None:
    assert DATA is not None
    recipe = load_any_recipe(name)
    assert isinstance(recipe, FineTuneRecipe)
    parts = read_parts(Path(DATA), recipe.data, read_labelled)
    assert (len(parts["train"]), len(parts["valid"]), len(parts["test"])) == sizes
    for part in (parts["train"], parts["valid"], parts["test"]):
        assert len({item.label for item in part}) == num_labels


TAGS = ["O", "B-a", "I-a", "B-b", "I-b", "B-a-b", "I-a-b"]
SENTENCE = st.lists(st.sampled_from(TAGS), max_size=9)


def spans_by_definition(tags: Sequence[str]) -> set[Span]:
    """Return the spans by brute force: every range and label that satisfies the definition."""

    def holds(start: int, end: int, label: str) -> bool:
        begins = tags[start] == f"B-{label}" or (
            tags[start] == f"I-{label}" and (start == 0 or tags[start - 1] not in (f"B-{label}", f"I-{label}"))
        )
        goes_on = all(tag == f"I-{label}" for tag in tags[start + 1 : end])
        ends = end == len(tags) or tags[end] != f"I-{label}"
        return begins and goes_on and ends

    places = combinations(range(len(tags) + 1), 2)
    return {(start, end, label) for start, end in places for label in ("a", "b", "a-b") if holds(start, end, label)}


@given(SENTENCE)
def test_spans_equal_those_of_the_definition(tags: list[str]) -> None:
    found = spans(tags)
    assert set(found) == spans_by_definition(tags)
    assert len(found) == len(set(found))


@given(
    st.lists(
        st.integers(0, 8).flatmap(lambda n: st.tuples(*[st.lists(st.sampled_from(TAGS), min_size=n, max_size=n)] * 2))
    )
)
def test_score_counts_spans_in_both(sentences: list[tuple[list[str], list[str]]]) -> None:
    expected = [spans_by_definition(a) for a, _ in sentences]
    found = [spans_by_definition(b) for _, b in sentences]
    score = span_score([a for a, _ in sentences], [b for _, b in sentences])
    right = sum(span in b for a, b in zip(expected, found, strict=True) for span in a)
    assert (score.expected, score.found, score.right) == (sum(map(len, expected)), sum(map(len, found)), right)
    if right:
        precision, recall = right / sum(map(len, found)), right / sum(map(len, expected))
        assert (score.precision, score.recall) == (precision, recall)
        assert score.f1 == pytest.approx(2 * precision * recall / (precision + recall))
    else:
        assert (score.precision, score.recall, score.f1) == (0, 0, 0)


def test_score_refuses_sentences_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="1 tags for 2 words"):
        span_score([["O", "O"]], [["O"]])
    with pytest.raises(ValueError, match="zip"):
        span_score([["O"]], [])


def test_score_of_nothing_is_zero() -> None:
    assert span_score([["O"]], [["O"]]) == SpanScore(expected=0, found=0, right=0)
