import math
import random
from bisect import bisect_right
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.training.passages import Passage, TokenDocuments, sentence_pairs


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
