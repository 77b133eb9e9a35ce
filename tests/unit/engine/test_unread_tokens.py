"""Tokens that a reader has not taken: returned unchanged, in few bytes, which are counted."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from antiphon.domain.request import TokenLogprob
from antiphon.engine import stream
from antiphon.engine.stream import Item, UnreadTokens

NUM_TOKENS = 256


def logprob(rng: random.Random, num_alternatives: int) -> TokenLogprob:
    """Return an entry whose numbers are exact in float32, as those of a model are."""
    alternatives = tuple((rng.randrange(300, 1 << 20), -rng.randrange(1 << 20) / 1024) for _ in range(num_alternatives))
    return TokenLogprob(rng.randrange(300, 1 << 20), -rng.randrange(1 << 20) / 1024, alternatives)


def pushed(items: list[Item]) -> UnreadTokens:
    tokens = UnreadTokens()
    for item in items:
        tokens.push(item)
    return tokens


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 8, 9, 10, 100])
@pytest.mark.parametrize("num_alternatives", [None, 0, 20])
def test_tokens_are_taken_as_they_were_pushed(num_tokens: int, num_alternatives: int | None) -> None:
    rng = random.Random(1)
    entries = [logprob(rng, num_alternatives or 0) for _ in range(num_tokens)]
    ids = tuple(entry.token_id for entry in entries)
    tokens = pushed(list(ids) if num_alternatives is None else list(entries))
    assert len(tokens) == num_tokens
    assert tokens.take() == (ids, () if num_alternatives is None else tuple(entries))
    assert (len(tokens), tokens.num_bytes, tokens.take()) == (0, 0, ((), ()))


def test_tokens_without_log_probabilities_may_stand_between_others() -> None:
    rng = random.Random(1)
    items = [logprob(rng, 2) if number % 3 else number for number in range(50)]
    ids, entries = pushed(items).take()
    assert ids == tuple(item.token_id if isinstance(item, TokenLogprob) else item for item in items)
    assert entries == tuple(item for item in items if isinstance(item, TokenLogprob))


@pytest.mark.parametrize(("num_alternatives", "max_token_bytes"), [(None, 8), (0, 24), (20, 230)])
def test_unread_tokens_take_the_memory_that_they_count(num_alternatives: int | None, max_token_bytes: int) -> None:
    """Regression: a token with 20 alternatives took 3 KB, and 500 streams that nobody read 400 MB."""
    rng = random.Random(1)
    # Other threads of this process allocate too. A compiled module has no lines: its objects are this file's.
    here = [tracemalloc.Filter(True, path) for path in (__file__, stream.__file__)]
    tracemalloc.start()
    try:
        tokens = UnreadTokens()
        for _ in range(NUM_TOKENS):
            entry = logprob(rng, num_alternatives or 0)
            tokens.push(entry.token_id if num_alternatives is None else entry)
        del entry
        gc.collect()  # empties the interpreter's list of freed tuples
        num_bytes = sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(here).traces)
    finally:
        tracemalloc.stop()
    assert num_bytes <= NUM_TOKENS * max_token_bytes
    assert tokens.num_bytes == pytest.approx(num_bytes, rel=0.3, abs=1000)
