import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.training.passages import TokenDocuments, sentence_runs


def documents(count: int, seed: int) -> list[list[list[int]]]:
    """Return documents of sentences whose tokens are all different."""
    chance = random.Random(seed)
    numbers = iter(range(10**9))
    return [
        [[next(numbers) for _ in range(chance.randint(1, 9))] for _ in range(chance.randint(1, 8))]
        for _ in range(count)
    ]


@given(st.integers(1, 12), st.integers(0, 1000), st.integers(9, 60))
def test_runs_are_whole_sentences_that_fit_and_lose_nothing(count: int, seed: int, max_tokens: int) -> None:
    made = documents(count, seed)
    packed = TokenDocuments(made)
    runs = [list(run.parts(packed)[0]) for run in sentence_runs(packed, max_tokens)]
    assert [token for run in runs for token in run] == [
        t for document in made for sentence in document for t in sentence
    ]
    first_tokens = {sentence[0]: len(sentence) for document in made for sentence in document}
    homes = {token: index for index, document in enumerate(made) for sentence in document for token in sentence}
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        assert len(run) <= max_tokens
        assert run[0] in first_tokens
        assert len({homes[token] for token in run}) == 1
        if following is not None and homes[following[0]] == homes[run[0]]:
            assert len(run) + first_tokens[following[0]] > max_tokens, "the next sentence would have fitted"


def test_the_end_of_a_sentence_that_is_too_long_is_left_out() -> None:
    packed = TokenDocuments([[[1, 2], [3, 4, 5, 6, 7], [8]]])
    assert [list(run.parts(packed)[0]) for run in sentence_runs(packed, 3)] == [[1, 2], [3, 4, 5], [8]]


def test_a_length_without_room_for_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        sentence_runs(TokenDocuments([[[1]]]), 0)
