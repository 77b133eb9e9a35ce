import os
from pathlib import Path

import pytest

from antiphon.errors import RecipeError
from antiphon.lab.scan import SPLITS, Split, scan_dataset
from antiphon.text.tokenizer import Tokenizer
from antiphon.training.corpus import load_corpus

DATA = os.environ.get("ANTIPHON_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="ANTIPHON_DATA does not name a folder with the training data")

# Numbers of examples that Lake and Baroni 2018 and Loula et al. 2018 publish: training, test.
PUBLISHED: dict[Split, tuple[int, int]] = {
    "simple": (16728, 4182),
    "length": (16990, 3920),
    "addprim_jump": (14670, 7706),
    "addprim_turn_left": (21890, 1208),
    "template_around_right": (15225, 4476),
    "template_jump_around_right": (18528, 1173),
    "template_opposite_right": (15225, 4476),
    "template_right": (15225, 4476),
}


@needs_data
@pytest.mark.parametrize("split", SPLITS)
def test_split_has_the_published_sizes_without_leakage(split: Split, tmp_path: Path) -> None:
    corpus = load_corpus(scan_dataset(Path(str(DATA)), split, tmp_path).data, tmp_path)
    assert (len(corpus.train) + len(corpus.valid), len(corpus.test)) == PUBLISHED[split]
    assert 0.01 < len(corpus.valid) / PUBLISHED[split][0] < 0.03
    parts = [{command for command, _ in part} for part in (corpus.train, corpus.valid, corpus.test)]
    assert parts[0].isdisjoint(parts[1] | parts[2])
    assert parts[1].isdisjoint(parts[2])


@needs_data
def test_examples_of_a_template_split_outside_both_parts_have_turn_in_the_place_of_the_verb(tmp_path: Path) -> None:
    everything = load_corpus(scan_dataset(Path(str(DATA)), "simple", tmp_path).data, tmp_path)
    split = load_corpus(scan_dataset(Path(str(DATA)), "template_around_right", tmp_path).data, tmp_path)
    of_parts = {*split.train, *split.valid, *split.test}
    rest = [pair for pair in [*everything.train, *everything.valid, *everything.test] if pair not in of_parts]
    assert len(rest) == 20_910 - 15_225 - 4_476
    assert all("turn around right" in command for command, _ in rest)
    assert not any("around right" in command for command, _ in [*split.train, *split.valid])
    assert all("around right" in command for command, _ in split.test)


@needs_data
@pytest.mark.parametrize("split", ["addprim_jump", "addprim_turn_left"])
def test_the_lone_primitive_is_trained(split: Split, tmp_path: Path) -> None:
    train = load_corpus(scan_dataset(Path(str(DATA)), split, tmp_path).data, tmp_path).train
    primitive = split.removeprefix("addprim_").replace("_", " ")
    assert sum(command == primitive for command, _ in train) > 1000


@needs_data
def test_each_word_is_one_token(tmp_path: Path) -> None:
    dataset = scan_dataset(Path(str(DATA)), "length", tmp_path)
    corpus = load_corpus(dataset.data, tmp_path)
    tokenizer = Tokenizer.train([text for pair in corpus.train for text in pair], dataset.vocab_size)
    for text in (text for pair in [*corpus.train[:500], *corpus.test[:500]] for text in pair):
        assert len(tokenizer.encode(text)) == len(text.split())


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"scan/tasks_train_simple\.txt\.gz is missing"):
        scan_dataset(tmp_path, "simple", tmp_path)
