"""Stop strings compared with a plain search in the whole text, for any token boundaries."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from antiphon.domain.errors import InvalidArgument
from antiphon.engine.stop_strings import StopFilter, TokenStopMatcher, check_stop_strings
from antiphon.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.train(["ab ba abab aab", "bbb ä ab"] * 4, vocab_size=275)
# Few letters, so that strings overlap each other and themselves; ä has two bytes, and can be two tokens.
TEXTS = st.text(alphabet="abä ", max_size=24)
STOPS = st.lists(st.text(alphabet="abä ", min_size=1, max_size=5), min_size=1, max_size=4)


def text_before_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """Return the text before the first completed stop string, and whether there is one, by a plain search."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def matcher_of(stops: list[str]) -> TokenStopMatcher:
    return TokenStopMatcher(stops, TOKENIZER.stream())


def pieces_of(ids: list[int], sizes: list[int]) -> list[list[int]]:
    pieces, rest = [], list(ids)
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    return [*pieces, rest]


@given(TEXTS, STOPS, st.lists(st.integers(0, 4), max_size=12))
@example("aabaab", ["aab", "abaa"], [1, 1, 1])
@example("abababc", ["ababc", "bab"], [])
@example("aaab", ["ab", "aab", "b"], [2])
def test_filter_returns_the_text_before_the_first_stop_string(text: str, stops: list[str], sizes: list[int]) -> None:
    ids = TOKENIZER.encode(text)
    filtered = StopFilter(stops, TOKENIZER.stream())
    let_out = ""
    expected, _ = text_before_stop(TOKENIZER.decode(ids), stops)
    for piece in pieces_of(ids, sizes):
        let_out += filtered.push(piece)
        assert expected.startswith(let_out)
    assert let_out + filtered.finish() == expected


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=12), STOPS)
def test_filter_and_matcher_agree_on_any_tokens(ids: list[int], stops: list[str]) -> None:
    """The tokens include invalid UTF-8 and special tokens."""
    filtered, matcher, stream = StopFilter(stops, TOKENIZER.stream()), matcher_of(stops), TOKENIZER.stream()
    let_out = "".join(filtered.push([token_id]) for token_id in ids) + filtered.finish()
    before, has_stopped = text_before_stop(stream.push(ids), stops)
    assert [matcher.push(token_id) for token_id in ids][-1:] == [has_stopped][: len(ids)]
    assert let_out == (before if has_stopped else TOKENIZER.decode(ids))


def test_filter_cuts_before_a_stop_string_that_the_end_completes() -> None:
    """Regression: a character cut off by the end becomes U+FFFD; it was returned although it was a stop string."""
    half = next(token_id for token_id in range(TOKENIZER.vocab_size) if TOKENIZER.bytes_of([token_id]) == b"\xc3")
    filtered = StopFilter(["\ufffd"], TOKENIZER.stream())
    assert filtered.push([*TOKENIZER.encode("a"), half]) + filtered.finish() == "a"


@given(TEXTS, STOPS)
def test_matcher_reports_the_token_that_completes_a_stop_string(text: str, stops: list[str]) -> None:
    ids = TOKENIZER.encode(text)
    matcher = matcher_of(stops)
    results = [matcher.push(token_id) for token_id in ids]
    stream, so_far = TOKENIZER.stream(), ""
    for token_id, is_complete in zip(ids, results, strict=True):
        so_far += stream.push([token_id])
        assert is_complete == text_before_stop(so_far, stops)[1]


@given(TEXTS, STOPS)
def test_filter_holds_back_only_text_that_can_become_a_stop_string(text: str, stops: list[str]) -> None:
    ids = TOKENIZER.encode(text)
    whole = TOKENIZER.decode(ids)
    if text_before_stop(whole, stops)[1]:
        return
    filtered = StopFilter(stops, TOKENIZER.stream())
    held = whole.removeprefix(filtered.push(ids))
    assert held == "" or any(stop.startswith(held) for stop in stops)


def test_filter_returns_text_unchanged_when_there_are_no_stop_strings() -> None:
    ids = TOKENIZER.encode("abä ab")
    filtered = StopFilter((), TOKENIZER.stream())
    assert "".join(filtered.push([token_id]) for token_id in ids) + filtered.finish() == "abä ab"


@pytest.mark.parametrize(
    ("stops", "complaint"),
    [(["a"] * 17, "17 entries"), ([""], "1 to 256 characters"), (["a", "x" * 257], "1 to 256 characters")],
)
def test_check_stop_strings_refuses_too_many_and_wrong_lengths(stops: list[str], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint) as caught:
        check_stop_strings(stops)
    assert caught.value.field == "stop_strings"


def test_check_stop_strings_accepts_everything_that_the_contract_allows() -> None:
    check_stop_strings([])
    check_stop_strings(["x" * 256, "\n"] * 8)
