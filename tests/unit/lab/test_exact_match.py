from collections.abc import Sequence

import pytest

from antiphon.lab.accuracy import exact_match, share_correct
from antiphon.text.tokenizer import Tokenizer

PAIRS = [("a", "a"), ("a b", "a b"), ("b a", "a b"), ("a b c", "a b c"), ("c", "c")]


def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a b c"], 300)


def test_exact_match_counts_by_target_length() -> None:
    """A decoder that copies its source is wrong for "b a" only."""

    def copying(sources: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        return [list(source[:-1])[:max_new_tokens] for source in sources]

    found = exact_match(copying, tokenizer(), PAIRS, batch_rows=2)
    assert found == {1: [True, True], 2: [True, False], 3: [True]}
    assert share_correct(found) == 0.8


def test_output_that_does_not_end_is_wrong() -> None:
    def endless(sources: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        return [(list(source[:-1]) * 100)[:max_new_tokens] for source in sources]

    assert share_correct(exact_match(endless, tokenizer(), PAIRS)) == 0


def test_no_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="pairs is empty"):
        exact_match(lambda sources, max_new_tokens: [], tokenizer(), [])
