import gzip
import hashlib
import os
import random
from pathlib import Path

import pytest

from antiphon.errors import RecipeError
from antiphon.training.corpus import HELD_OUT_MAX_GROUP, Pair, held_out_rule, load_corpus
from antiphon.training.recipe import DataConfig, DataFile, load_recipe

DATA = os.environ.get("ANTIPHON_DATA")


def made_up_pairs(count: int, seed: int) -> list[Pair]:
    """Return pairs that often share sentences, with differences only in case and punctuation."""
    chance = random.Random(seed)

    def sentence(side: str) -> str:
        words = f"{side} word {chance.randrange(count)}"
        return chance.choice([words, words.title() + ".", words.upper() + "!"])

    return [(sentence("source"), sentence("target")) for _ in range(count)]


def plain(text: str) -> str:
    return "".join(char for char in text.lower() if char.isalnum())


@pytest.mark.parametrize("seed", range(3))
def test_no_sentence_is_in_two_parts(seed: int) -> None:
    pairs = made_up_pairs(6000, seed)
    corpus = held_out_rule(pairs)
    assert sorted(corpus.train + corpus.valid + corpus.test) == sorted(pairs)
    assert corpus.valid
    assert corpus.test
    parts = [{plain(text) for pair in part for text in pair} for part in (corpus.train, corpus.valid, corpus.test)]
    assert parts[0].isdisjoint(parts[1] | parts[2])
    assert parts[1].isdisjoint(parts[2])


def test_split_depends_on_the_text_alone() -> None:
    pairs = made_up_pairs(6000, seed=9)
    shuffled = random.Random(1).sample(pairs, len(pairs))
    assert sorted(held_out_rule(shuffled).test) == sorted(held_out_rule(pairs).test)


def test_large_groups_are_in_the_training_part() -> None:
    pairs = [("one and the same", f"target {index}") for index in range(HELD_OUT_MAX_GROUP + 1)]
    assert held_out_rule(pairs).train == pairs


def data_config(path: Path, content: bytes) -> DataConfig:
    path.write_bytes(content)
    file = DataFile(path=path.name, sha256=hashlib.sha256(content).hexdigest())
    return DataConfig(
        origin="made up", licence="CC0", attribution="none", pairs=file, source_language="en", target_language="de"
    )


def test_pairs_are_read_from_gzip(tmp_path: Path) -> None:
    config = data_config(tmp_path / "pairs.tsv.gz", gzip.compress("a\tb\tignored\nc d\té\n".encode()))
    corpus = load_corpus(config, tmp_path)
    assert sorted(corpus.train + corpus.valid + corpus.test) == [("a", "b"), ("c d", "é")]


def test_line_without_a_tab_is_named(tmp_path: Path) -> None:
    config = data_config(tmp_path / "pairs.tsv", b"a\tb\nno tab here\n")
    with pytest.raises(RecipeError, match=r"pairs\.tsv: line 2 has no tab"):
        load_corpus(config, tmp_path)


def test_missing_data_is_named(tmp_path: Path) -> None:
    config = data_config(tmp_path / "pairs.tsv", b"a\tb\n")
    with pytest.raises(RecipeError, match=r"elsewhere/pairs\.tsv is missing"):
        load_corpus(config, tmp_path / "elsewhere")


def test_changed_data_is_refused(tmp_path: Path) -> None:
    config = data_config(tmp_path / "pairs.tsv", b"a\tb\n")
    (tmp_path / "pairs.tsv").write_bytes(b"a\tc\n")
    with pytest.raises(RecipeError, match=r"pairs\.tsv has sha256"):
        load_corpus(config, tmp_path)


@pytest.mark.parametrize("name", ["tatoeba-en-de", "multi30k-en-de"])
def test_shipped_recipe_is_valid(name: str) -> None:
    assert load_recipe(name).name == name


def test_unknown_recipe_is_refused_with_the_names_of_existing_ones() -> None:
    with pytest.raises(RecipeError, match="tatoeba-en-de"):
        load_recipe("no-such-recipe")


def test_recipe_with_a_wrong_field_names_it(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "model/antiphon/training/recipes/tatoeba-en-de.toml").read_text()
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(text.replace("label_smoothing = 0.1", "label_smoothing = 2"))
    with pytest.raises(RecipeError, match=r"train\.label_smoothing"):
        load_recipe(str(wrong))


def test_recipe_for_half_a_transformer_is_refused(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "model/antiphon/training/recipes/tatoeba-en-de.toml").read_text()
    half = tmp_path / "half.toml"
    half.write_text(text.replace('"encoder-decoder"', '"decoder"').replace("encoder_layers = 6", "encoder_layers = 0"))
    with pytest.raises(RecipeError, match=r"model\.architecture is 'decoder'"):
        load_recipe(str(half))


@pytest.mark.skipif(DATA is None, reason="ANTIPHON_DATA does not name a folder with the training data")
def test_shipped_recipes_data_splits_without_leakage() -> None:
    corpus = load_corpus(load_recipe("tatoeba-en-de").data, Path(str(DATA)))
    assert len(corpus.test) > 1000
    held = {plain(text) for pair in corpus.test + corpus.valid for text in pair}
    assert held.isdisjoint(plain(text) for pair in corpus.train for text in pair)
