"""Recipes of data, text files, sentence pairs, and collections of them: split, repeats and augmentation."""

import gzip
import hashlib
import json
import math
import os
import random
from bisect import bisect_right
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from antiphon.errors import RecipeError
from antiphon.text.tokenizer import Tokenizer
from antiphon.training.corpus import (
    HELD_OUT_MAX_GROUP,
    Labelled,
    Pair,
    Tagged,
    held_out_rule,
    is_held_out,
    load_collections,
    load_corpus,
    read_documents,
    read_labelled,
    read_parts,
    read_tagged,
    read_texts,
)
from antiphon.training.passages import Passage, TokenDocuments, sentence_pairs
from antiphon.training.recipe import (
    Augmentation,
    DataConfig,
    DataFile,
    LabelledData,
    Recipe,
    TextFile,
    load_any_recipe,
    load_recipe,
)
from antiphon.training.translation import RepeatedPairs, TokenSplitter, epoch_pairs
from tests.pair_collections import collections, pairs_of
from tests.recipe_files import write_recipe

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


@pytest.mark.parametrize(
    ("content", "folder", "message"),
    [
        (b"a\tb\nno tab here\n", ".", r"pairs\.tsv: line 2 has no tab"),
        (b"a\tb\n", "elsewhere", r"elsewhere/pairs\.tsv is missing"),
        (b"a\tc\n", ".", r"pairs\.tsv has sha256"),
    ],
)
def test_wrong_data_are_refused_by_name(tmp_path: Path, content: bytes, folder: str, message: str) -> None:
    config = data_config(tmp_path / "pairs.tsv", b"a\tb\n" if b"c" in content else content)
    (tmp_path / "pairs.tsv").write_bytes(content)
    with pytest.raises(RecipeError, match=message):
        load_corpus(config, tmp_path / folder)


@pytest.mark.parametrize("name", ["tatoeba-en-de", "multi30k-en-de"])
def test_shipped_recipe_is_valid(name: str) -> None:
    assert load_recipe(name).name == name


def test_unknown_recipe_is_refused_with_the_names_of_existing_ones() -> None:
    with pytest.raises(RecipeError, match="tatoeba-en-de"):
        load_recipe("no-such-recipe")


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("mlm-small", 'task = "pretrain"', 'task = "pretend"', "task must be translate"),
        ("mlm-small", "token_types = 2", "token_types = 0", r"model\.token_types=0 must be at least 2"),
        ("mlm-small", "num_heads = 4", "num_heads = 7", "num_heads=7 does not divide"),
        ("mlm-small", 'schedule = "linear"', 'schedule = "cosine"', r"train\.schedule"),
        ("mlm-small", "[train]", "[masking]\nrate = 0.0\n[train]", r"masking\.rate"),
        ("mlm-small", "[train]", "[masking]\nmasked = 0.95\n[train]", r"masking: masked=0\.95 and random=0\.1"),
        ("mlm-small", 'format = "conll"', 'format = "xml"', r"data\.sentences\.8\.format"),
        ("snips", "[train]", "[model]\nd_model = 8\n[train]", "model: Extra inputs"),
        ("wnut17", "sha256", "sha265", r"data\.train\.0\.sha256"),
        ("tatoeba-en-de", "label_smoothing = 0.1", "label_smoothing = 2", r"train\.label_smoothing"),
        ("shakespeare-gpt", "split = [0.9, 0.1]", "split = [0.9, 0.3]", r"data: split=\[0\.9, 0\.3\]"),
    ],
)
def test_recipe_with_a_wrong_field_names_it(tmp_path: Path, name: str, old: str, new: str, message: str) -> None:
    text = (Path(__file__).parents[3] / f"model/antiphon/training/recipes/{name}.toml").read_text()
    assert old in text
    (tmp_path / "recipe.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(RecipeError, match=message):
        load_any_recipe(str(tmp_path / "recipe.toml"))


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


def written(folder: Path, name: str, content: bytes, **settings: str) -> TextFile:
    (folder / name).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    return TextFile.model_validate(dict(path=name, sha256=digest, **settings))


def test_lines_keep_characters_that_are_not_line_ends(tmp_path: Path) -> None:
    file = written(tmp_path, "a.txt.gz", gzip.compress("one\u2028two\n\nthree\r\n".encode()))
    assert read_texts(tmp_path, file) == ["one\u2028two", "three"]


def test_documents_end_at_blank_lines(tmp_path: Path) -> None:
    file = written(tmp_path, "a.txt", b"\n\none\n two\n\n \nthree\n")
    assert read_documents(tmp_path, file) == [["one", "two"], ["three"]]


def test_snips_texts_are_joined_from_their_chunks(tmp_path: Path) -> None:
    item = {"data": [{"text": "Play "}, {"text": "Motörhead", "entity": "artist"}]}
    content = json.dumps({"PlayMusic": [item]}, ensure_ascii=False).encode("latin-1")
    file = written(tmp_path, "a.json", content, format="snips", encoding="latin-1")
    assert read_labelled(tmp_path, file) == [Labelled(text="Play Motörhead", label="PlayMusic")]
    assert read_texts(tmp_path, file) == ["Play Motörhead"]
    as_utf8 = file.model_copy(update={"encoding": "utf-8"})
    with pytest.raises(RecipeError, match=r"a\.json is not encoding='utf-8'"):
        read_labelled(tmp_path, as_utf8)


def test_json_is_a_list_of_text_and_label_below_a_key(tmp_path: Path) -> None:
    content = json.dumps({"train": [["so good ", "praise"]], "val": [["so bad", "blame"]]}).encode()
    file = written(tmp_path, "a.json", content, format="json", key="val")
    assert read_labelled(tmp_path, file) == [Labelled(text="so bad", label="blame")]
    assert read_texts(tmp_path, file.model_copy(update={"key": "train"})) == ["so good"]


def test_key_belongs_to_json_files_only() -> None:
    for settings in (dict(format="json"), dict(format="tsv", key="train")):
        with pytest.raises(ValidationError, match="does not fit format="):
            TextFile.model_validate(dict(path="a", sha256="0" * 64, **settings))


def test_tsv_is_text_and_label(tmp_path: Path) -> None:
    file = written(tmp_path, "a.tsv", b"so good\t1\nso bad\t0\n", format="tsv")
    assert read_labelled(tmp_path, file) == [Labelled(text="so good", label="1"), Labelled(text="so bad", label="0")]
    assert read_texts(tmp_path, file) == ["so good", "so bad"]


def test_conll_sentences_end_at_blank_lines_even_with_a_tab(tmp_path: Path) -> None:
    file = written(tmp_path, "a.conll", b"New\tB-place\nYork\tI-place\n\t\nHi\tO\n\n", format="conll")
    first, second = read_tagged(tmp_path, file)
    assert first == Tagged(words=("New", "York"), tags=("B-place", "I-place"))
    assert (first.text, second.words) == ("New York", ("Hi",))
    assert read_texts(tmp_path, file) == ["New York", "Hi"]


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (b"no label\n", dict(format="tsv"), r"a: line 1 must be text, tab and label"),
        (b"x\tO\ny\tX-place\n", dict(format="conll"), r"a: line 2 must be word, tab and one of O"),
        (b"y\tB-\n", dict(format="conll"), r"a: line 1 must be word"),
        (b'{"intent": [{"texts": 1}]}', dict(format="snips"), r"a must be JSON of the form"),
        (b"[1]", dict(format="snips"), r"a must be JSON"),
        (b'{"val": []}', dict(format="json", key="train"), r"a must be a JSON object whose 'train' has"),
        (b'{"train": [["x"]]}', dict(format="json", key="train"), r"a list of \[text, label\]"),
        (b"x\n", dict(format="lines"), r"a: format='lines' has no labels"),
    ],
)
def test_file_of_another_format_is_refused_by_name(
    tmp_path: Path, content: bytes, settings: dict[str, str], message: str
) -> None:
    file = written(tmp_path, "a", content, **settings)
    with pytest.raises(RecipeError, match=message):
        (read_tagged if file.format == "conll" else read_labelled)(tmp_path, file)


def test_documents_are_refused_when_a_file_is_labelled(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"data\.ordered; it must be 'lines'"):
        read_documents(tmp_path, written(tmp_path, "a", b"x\ty\n", format="tsv"))


def test_validation_is_held_out_of_training_by_text(tmp_path: Path) -> None:
    lines = "".join(f"text number {index}\tlabel\n" for index in range(2000))
    train = written(tmp_path, "train", lines.encode(), format="tsv")
    test = written(tmp_path, "test", b"another\tlabel\n", format="tsv")
    data = LabelledData(origin="", licence="", attribution="", train=(train,), test=(test,))
    parts = read_parts(tmp_path, data, read_labelled)
    assert len(parts["train"]) + len(parts["valid"]) == 2000
    assert 60 < len(parts["valid"]) < 140
    assert {item.text for item in parts["train"]}.isdisjoint(item.text for item in parts["valid"])
    given = read_parts(tmp_path, data.model_copy(update={"valid": (test,)}), read_labelled)
    assert (len(given["train"]), len(given["valid"])) == (2000, 1)
    assert is_held_out("Text  number 1") == is_held_out("text number 1")


def documents(count: int, seed: int, max_sentences: int = 8) -> TokenDocuments:
    """Return documents whose tokens are all different, so that a test can find the origin of each."""
    chance = random.Random(seed)
    numbers = iter(range(10**9))
    return TokenDocuments(
        [[next(numbers) for _ in range(chance.randint(1, 9))] for _ in range(chance.randint(1, max_sentences))]
        for _ in range(count)
    )


def home(made: TokenDocuments, token: int) -> int:
    """Return the document of a token; tokens are numbered in the order of the documents."""
    return made.document_of(bisect_right(made.sentence_starts, token) - 1)


def test_documents_keep_their_sentences_without_empty_ones() -> None:
    made = TokenDocuments([[[1, 2], [], [3]], [[]], [[4]]])
    assert (len(made), made.num_sentences, list(made.tokens)) == (2, 3, [1, 2, 3, 4])
    assert [list(made.sentences_of(index)) for index in range(2)] == [[0, 1], [2]]
    assert [made.document_of(sentence) for sentence in range(3)] == [0, 0, 1]


@given(st.integers(2, 12), st.integers(0, 1000), st.integers(2, 60))
def test_pairs_respect_the_length_and_have_two_parts(count: int, seed: int, max_tokens: int) -> None:
    made = documents(count, seed)
    for pair in sentence_pairs(made, max_tokens, seed):
        first, second = pair.parts(made)
        assert first
        assert second
        assert len(first) + len(second) == len(pair) <= max_tokens


@given(st.integers(2, 12), st.integers(0, 1000), st.integers(40, 200))
def test_second_part_follows_the_first_only_if_is_next(count: int, seed: int, max_tokens: int) -> None:
    made = documents(count, seed)
    for pair in sentence_pairs(made, max_tokens, seed):
        first, second = pair.parts(made)
        assert len({home(made, token) for token in first}) == 1
        assert len({home(made, token) for token in second}) == 1
        assert (home(made, first[0]) == home(made, second[0])) == pair.is_next
        if pair.is_next and len(pair) < max_tokens:
            assert second[0] == first[-1] + 1, "nothing was cut, so it continues where the first part ended"


def test_every_document_is_read_once_through() -> None:
    """Without truncation first and following second parts are the whole document, except a last sentence alone."""
    made = documents(40, seed=3)
    used: list[int] = []
    for pair in sentence_pairs(made, 10_000, seed=4):
        first, second = pair.parts(made)
        used += [*first, *(second if pair.is_next else ())]
    assert len(used) == len(set(used))
    last = {made.sentences_of(index)[-1] for index in range(len(made))}
    assert {bisect_right(made.sentence_starts, token) - 1 for token in set(made.tokens) - set(used)} <= last


def test_half_of_the_pairs_are_random() -> None:
    pairs = sentence_pairs(documents(3000, seed=1), 30, seed=2)
    following = sum(bool(pair.is_next) for pair in pairs)
    assert abs(following - len(pairs) / 2) < 5 * math.sqrt(len(pairs) / 4)


def test_one_pair_in_ten_is_shorter() -> None:
    """Sentences have at most nine tokens, so a pair within a long document has at least 92, unless shortened."""
    pairs = sentence_pairs(documents(10, seed=1, max_sentences=20_000), 100, seed=2)
    short = sum(len(pair) < 92 for pair in pairs) / len(pairs)
    assert 0.07 < short < 0.15


def test_length_does_not_tell_random_pairs() -> None:
    """Mean lengths of the second parts differ by less than four standard errors."""
    pairs = sentence_pairs(documents(1000, seed=1, max_sentences=1000), 50, seed=2)

    def lengths(*, is_next: bool) -> list[int]:
        return [pair.second_end - pair.second_start for pair in pairs if pair.is_next == is_next]

    following, other = lengths(is_next=True), lengths(is_next=False)
    means = [sum(found) / len(found) for found in (following, other)]
    spread = math.sqrt(sum((length - means[0]) ** 2 for length in following) / len(following))
    assert abs(means[0] - means[1]) < 4 * spread * math.sqrt(1 / len(following) + 1 / len(other))


def test_random_parts_come_from_long_documents_as_often_as_their_share() -> None:
    made = TokenDocuments([[[1]] * 10 for _ in range(50)] + [[[2]] * 500, [[3]] * 10])
    origins = Counter(
        made.tokens[pair.second_start]
        for pair in sentence_pairs(made, 2, seed=1)
        if not pair.is_next and made.tokens[pair.first_start] != 2
    )
    assert abs(origins[2] / origins.total() - 0.5) < 5 * math.sqrt(0.25 / origins.total())


def test_pairs_are_a_function_of_their_seed() -> None:
    made = documents(20, seed=5)
    pairs: list[Passage] = sentence_pairs(made, 40, seed=1)
    assert pairs == sentence_pairs(made, 40, seed=1)
    assert pairs != sentence_pairs(made, 40, seed=2)


def test_one_document_makes_no_pairs() -> None:
    with pytest.raises(ValueError, match="1 documents"):
        sentence_pairs(documents(1, seed=1), 40, seed=1)


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
@pytest.mark.training
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
