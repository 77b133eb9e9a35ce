"""Several collections of sentence pairs: their split, repeats, augmentation and token splitting."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from antiphon.errors import RecipeError
from antiphon.text.tokenizer import Tokenizer
from antiphon.training.corpus import held_out_rule, load_collections, load_corpus
from antiphon.training.recipe import Augmentation, DataConfig, Recipe, load_recipe
from antiphon.training.translation import RepeatedPairs, TokenSplitter, epoch_pairs
from tests.pair_collections import collections, pairs_of
from tests.recipe_files import write_recipe

DATA = os.environ.get("ANTIPHON_DATA")

TEXTS = [f"Number {index} is the sum of its {index % 7} parts." for index in range(400)]


def test_each_collection_is_split_as_if_alone_and_no_held_out_sentence_is_trained_on(tmp_path: Path) -> None:
    first = pairs_of("first", 3000)
    # In the second collection the smallest source of a group, which decides the part, is another one.
    shared = [(text, f"other {target}") for source, target in first[:1500] for text in (source, f"a {source}")]
    config = collections(tmp_path, {"one": first, "two": [*shared, *pairs_of("second", 1500)]})
    parts = load_collections(config, tmp_path)
    assert parts["one"].test == held_out_rule(first).test
    held_out = {source for part in parts.values() for source, _ in (*part.valid, *part.test)}
    assert held_out & {source for source, _ in shared}
    for part in parts.values():
        assert part.train
        assert held_out.isdisjoint(source for source, _ in part.train)
    assert load_corpus(config, tmp_path).test == parts["one"].test + parts["two"].test


def write_recipes(folder: Path, data: DataConfig) -> tuple[Recipe, str]:
    """Write a recipe of this data and one of its reverse; return the first, and the path of the second."""
    model = dict(d_model=8, encoder_layers=1, decoder_layers=1, num_heads=1, d_ff=8)
    first = Recipe.model_validate({"name": "first", "vocab_size": 300, "data": data, "model": model, "train": {}})
    path = write_recipe(first, folder / "first.toml")
    second = folder / "second.toml"
    second.write_text(
        f'name = "second"\nvocab_size = 300\ndata = {{ reverse_of = "{path}" }}\ntrain = {{}}\nmodel = {{ d_model = 8, '
        "encoder_layers = 1, decoder_layers = 1, num_heads = 1, d_ff = 8 }\n"
    )
    return first, str(second)


def test_reversed_data_have_the_same_parts_with_the_sides_exchanged(tmp_path: Path) -> None:
    data = collections(tmp_path, {"one": pairs_of("first", 1000), "two": pairs_of("second", 1000)})
    first, path = write_recipes(tmp_path, data)
    second = load_recipe(path)
    assert (second.data.source_language, second.data.target_language) == ("de", "en")
    assert second.data.attribution == first.data.attribution
    expected, found = load_collections(first.data, tmp_path), load_collections(second.data, tmp_path)
    assert found.keys() == expected.keys()
    for name, corpus in expected.items():
        for part in ("train", "valid", "test"):
            pairs = getattr(corpus, part)
            assert pairs
            assert getattr(found[name], part) == [(target, source) for source, target in pairs]
    assert load_corpus(second.data, tmp_path).test == found["one"].test + found["two"].test


def test_the_reverse_of_one_file_of_pairs(tmp_path: Path) -> None:
    data = collections(tmp_path, {"one": pairs_of("first", 1000)})
    file = data.collections[0].model_dump(include={"path", "sha256"})
    origin = dict(origin="made up", licence="CC0", attribution="nobody", source_language="en", target_language="de")
    first, path = write_recipes(tmp_path, DataConfig.model_validate({**origin, "pairs": file}))
    expected, found = load_corpus(first.data, tmp_path), load_corpus(load_recipe(path).data, tmp_path)
    assert found.test == [(target, source) for source, target in expected.test]
    assert found.train == [(target, source) for source, target in expected.train]


def test_the_reverse_of_a_reverse_is_refused(tmp_path: Path) -> None:
    _, path = write_recipes(tmp_path, collections(tmp_path, {"one": pairs_of("first", 3)}))
    third = tmp_path / "third.toml"
    third.write_text(Path(path).read_text().replace(str(tmp_path / "first.toml"), str(third)))
    with pytest.raises(RecipeError, match=r"third\.toml: data\.reverse_of is .* the reverse of another"):
        load_recipe(str(third))


def test_the_reverse_of_a_recipe_with_wrong_data_is_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "first.toml", tmp_path / "second.toml"
    first.write_text('name = "first"\ndata = 5\n')
    second.write_text(f'name = "second"\ndata = {{ reverse_of = "{first}" }}\n')
    with pytest.raises(RecipeError, match=r"first\.toml: "):
        load_recipe(str(second))


def test_origin_of_collections_names_each_of_them(tmp_path: Path) -> None:
    config = collections(tmp_path, {"one": pairs_of("a", 3), "two": pairs_of("b", 3)})
    assert config.licence == "licence of one; licence of two"
    assert config.attribution.splitlines() == [
        f"- {name}: origin of {name}. licence of {name}. authors of {name}" for name in ("one", "two")
    ]


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    config = collections(tmp_path, {"one": pairs_of("a", 3)}).model_dump()
    with pytest.raises(ValueError, match="'one' occurs more than once"):
        DataConfig.model_validate({**config, "collections": [*config["collections"] * 2]})


def test_pairs_occur_as_often_as_repeat_says() -> None:
    parts = [RepeatedPairs(pairs=pairs_of("a", 40), repeat=2.25), RepeatedPairs(pairs=pairs_of("b", 30), repeat=0.5)]
    drawn = [Counter(epoch_pairs(parts, Augmentation(), seed)) for seed in (1, 2)]
    for counts in drawn:
        assert Counter(counts[pair] for pair in parts[0].pairs) == {2: 30, 3: 10}
        assert Counter(counts[pair] for pair in parts[1].pairs) == {0: 15, 1: 15}
    assert drawn[0] != drawn[1]
    assert Counter(epoch_pairs(parts, Augmentation(), 1)) == drawn[0]


@pytest.mark.parametrize("in_order", [True, False])
def test_joined_pairs_are_neighbours_only_in_collections_in_order(*, in_order: bool) -> None:
    pairs = [(f"s{index}", f"t{index}") for index in range(500)]
    part = RepeatedPairs(pairs=pairs, in_order=in_order)
    found = epoch_pairs([part], Augmentation(joined=0.5), seed=3)
    joined = [(source.split(), target.split()) for source, target in found if " " in source]
    assert 200 < len(joined) < 300
    distances = set()
    for sources, targets in joined:
        assert [text[1:] for text in sources] == [text[1:] for text in targets]
        distances.add(int(sources[1][1:]) - int(sources[0][1:]))
    assert (distances == {1}) == in_order


def test_noise_changes_case_of_the_source_and_full_stops_of_both_sides() -> None:
    pairs = [("A House.", "Ein Haus."), ("Why?", "Warum?")] * 500
    found = Counter(epoch_pairs([RepeatedPairs(pairs=pairs)], Augmentation(lower_case=0.5, no_full_stop=0.5), seed=1))
    houses = {("A House.", "Ein Haus."), ("a house.", "Ein Haus."), ("A House", "Ein Haus"), ("a house", "Ein Haus")}
    assert set(found) == {*houses, ("Why?", "Warum?"), ("why?", "Warum?")}
    assert min(found[pair] for pair in houses) > 80  # of 125 expected, with a deviation below 11


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.999])
def test_split_tokens_are_the_same_texts(rate: float) -> None:
    tokenizer = Tokenizer.train(TEXTS, 400)
    rows = [tokenizer.encode(text) for text in ("", *TEXTS[:50], "")]
    split = TokenSplitter(tokenizer, rate).split(rows, seed=7)
    assert [tokenizer.decode(row) for row in split] == [tokenizer.decode(row) for row in rows]
    lengths = [sum(len(row) for row in some) for some in (rows, split)]
    assert lengths[1] > lengths[0] if rate else split == rows
    assert split == TokenSplitter(tokenizer, rate).split(rows, seed=7)


def test_share_of_split_tokens_is_the_rate() -> None:
    tokenizer = Tokenizer.train(TEXTS, 400)
    merged, left, right = tokenizer.merges()[0]  # of two bytes, which cannot be split again
    whole = [[merged]] * 4000
    split = TokenSplitter(tokenizer, 0.25).split(whole, seed=1)
    assert np.mean([row != [merged] for row in split]) == pytest.approx(0.25, abs=0.04)
    assert {tuple(row) for row in split} == {(merged,), (left, right)}


@pytest.mark.skipif(DATA is None, reason="ANTIPHON_DATA does not name a folder with the training data")
def test_held_out_pairs_of_tatoeba_are_those_of_the_recipe_of_tatoeba_alone() -> None:
    folder, data = Path(str(DATA)), load_recipe("open-en-de").data
    # `antiphon corpus` makes the files of some collections; they are not in every data folder.
    there = tuple(collection for collection in data.collections if (folder / collection.path).is_file())
    folders = {Path(collection.path).parent.name for collection in data.collections if collection not in there}
    assert folders <= {"ding", "debian-games"}
    parts = load_collections(data.model_copy(update={"collections": there}), folder)
    alone = load_corpus(load_recipe("tatoeba-en-de").data, folder)
    assert parts["tatoeba"].test == alone.test
    assert len(alone.train) * 0.99 < len(parts["tatoeba"].train) <= len(alone.train)
    assert all(part.train and part.valid and part.test for part in parts.values())
