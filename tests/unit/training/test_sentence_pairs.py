import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.model.training.data.sentence_pairs import sentence_pairs

Documents = list[list[list[int]]]


def documents(count: int, seed: int, max_sentences: int = 8) -> Documents:
    """Return documents whose tokens are all different, so that a test can find the origin of each."""
    chance = random.Random(seed)
    numbers = iter(range(10**9))
    return [
        [[next(numbers) for _ in range(chance.randint(1, 9))] for _ in range(chance.randint(1, max_sentences))]
        for _ in range(count)
    ]


@given(st.integers(2, 12), st.integers(0, 1000), st.integers(2, 60))
def test_pairs_keep_to_the_length_and_have_two_parts(count: int, seed: int, max_tokens: int) -> None:
    for pair in sentence_pairs(documents(count, seed), max_tokens, seed):
        assert pair.first
        assert pair.second
        assert len(pair.first) + len(pair.second) <= max_tokens


@given(st.integers(2, 12), st.integers(0, 1000), st.integers(40, 200))
def test_second_part_follows_the_first_only_if_is_next(count: int, seed: int, max_tokens: int) -> None:
    made = documents(count, seed)
    home = {token: index for index, document in enumerate(made) for sentence in document for token in sentence}
    for pair in sentence_pairs(made, max_tokens, seed):
        assert len({home[token] for token in pair.first}) == 1
        assert len({home[token] for token in pair.second}) == 1
        assert (home[pair.first[0]] == home[pair.second[0]]) == pair.is_next
        if pair.is_next and len(pair.first) + len(pair.second) < max_tokens:
            assert pair.second[0] == pair.first[-1] + 1, "nothing was cut, so it goes on where the first part ended"


def test_every_document_is_read_once_through() -> None:
    """Without truncation first and following second parts are the whole document, except a last sentence alone."""
    made = documents(40, seed=3)
    used = []
    for pair in sentence_pairs(made, 10_000, seed=4):
        used += pair.first + (pair.second if pair.is_next else [])
    assert len(used) == len(set(used))
    missing = {token for document in made for sentence in document for token in sentence} - set(used)
    assert missing <= {token for document in made for token in document[-1]}


def test_half_of_the_pairs_are_random() -> None:
    pairs = sentence_pairs(documents(3000, seed=1), 30, seed=2)
    following = sum(pair.is_next for pair in pairs)
    assert abs(following - len(pairs) / 2) < 5 * math.sqrt(len(pairs) / 4)


def test_pairs_are_a_function_of_their_seed() -> None:
    made = documents(20, seed=5)
    assert sentence_pairs(made, 40, seed=1) == sentence_pairs(made, 40, seed=1)
    assert sentence_pairs(made, 40, seed=1) != sentence_pairs(made, 40, seed=2)


def test_one_document_makes_no_pairs() -> None:
    with pytest.raises(ValueError, match="1 documents"):
        sentence_pairs(documents(1, seed=1), 40, seed=1)
