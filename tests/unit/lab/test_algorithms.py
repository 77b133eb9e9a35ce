"""Each task's output is checked by another calculation than the one that made it."""

from pathlib import Path

import pytest

from antiphon.lab.datasets import ALGORITHMS, Algorithm, Sizes, algorithm_dataset
from antiphon.text.tokenizer import Tokenizer
from antiphon.training.corpus import Pair, load_corpus
from tests.unit.lab.recurrent_models import SIZES, made_dataset

PAIRS = {"(": ")", "[": "]", "{": "}"}


def length_of(algorithm: Algorithm, source: str) -> int:
    words = source.split()
    return {"addition": (len(words) - 1) // 2, "counting": len(words) - 2}.get(algorithm, len(words))


def number(words: list[str]) -> int:
    return sum(int(word) * 10**place for place, word in enumerate(words))


def is_right(algorithm: Algorithm, source: list[str], target: list[str]) -> bool:
    if algorithm == "copy":
        return source == target
    if algorithm == "reverse":
        return source[::-1] == target
    if algorithm == "sort":
        return sorted(source) == target
    if algorithm == "addition":
        plus = source.index("+")
        return number(source[:plus]) + number(source[plus + 1 :]) == number(target)
    if algorithm == "counting":
        return int("".join(target)) == source[2:].count(source[0])
    whole = "".join(source + target)
    while whole != (shorter := whole.replace("()", "").replace("[]", "").replace("{}", "")):
        whole = shorter
    return not whole and set(target) <= set(PAIRS.values()) and bool(target)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_outputs_and_lengths_are_right(algorithm: Algorithm, tmp_path: Path) -> None:
    dataset = made_dataset(tmp_path, algorithm)
    corpus = load_corpus(dataset.data, tmp_path)
    for source, target in [*corpus.train, *(pair for part in dataset.tests.values() for pair in part)]:
        assert is_right(algorithm, source.split(), target.split()), (source, target)
    assert {length_of(algorithm, source) for source, _ in corpus.train} == set(range(1, SIZES.max_len + 1))
    for name, pairs in dataset.tests.items():
        lengths = {length_of(algorithm, source) for source, _ in pairs}
        assert lengths <= set(range(1, 10)) if name == "in range" else lengths == {int(name.removeprefix("length "))}
    assert list(dataset.tests) == ["in range", "length 13", "length 18", "length 27", "length 36"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_test_sources_are_unseen(algorithm: Algorithm, tmp_path: Path) -> None:
    dataset = made_dataset(tmp_path, algorithm)
    corpus = load_corpus(dataset.data, tmp_path)
    assert corpus.test == list(dataset.tests["in range"])
    seen = {source for source, _ in corpus.train}
    for pairs in (corpus.valid, *dataset.tests.values()):
        sources = [source for source, _ in pairs]
        assert sources
        assert len(set(sources)) == len(sources)
        assert seen.isdisjoint(sources)
        seen.update(sources)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_word_is_one_token_at_any_position(algorithm: Algorithm, tmp_path: Path) -> None:
    dataset = made_dataset(tmp_path, algorithm)
    corpus = load_corpus(dataset.data, tmp_path)
    tokenizer = Tokenizer.train([text for pair in corpus.train for text in pair], dataset.vocab_size)
    ids: dict[str, int] = {}
    tests: list[Pair] = [pair for part in dataset.tests.values() for pair in part]
    for text in (text for pair in [*corpus.train, *tests] for text in pair):
        words, found = text.split(), tokenizer.encode(text)
        assert len(found) == len(words) < SIZES.longest_tokens
        assert all(ids.setdefault(word, token) == token for word, token in zip(words, found, strict=True))


def test_seed_decides_the_data(tmp_path: Path) -> None:
    first, again, other = (
        algorithm_dataset("sort", tmp_path / str(index), SIZES, seed) for index, seed in enumerate((1, 1, 2))
    )
    assert first == again
    assert first.data.train != other.data.train


def test_wrong_size_is_named() -> None:
    with pytest.raises(ValueError, match="max_len is 8; it must be at least 9"):
        Sizes(max_len=8)
