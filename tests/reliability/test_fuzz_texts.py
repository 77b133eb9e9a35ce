"""Random Unicode texts for every kind of tokenizer, and random bytes for their readers; see fuzz_targets.py."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.marks import hardship
from tests.reliability.fuzz_targets import SEEDS, TARGETS, check_text, shipped_tokenizer
from tests.reliability.sizes import size
from tests.reliability.test_fuzz_messages import fuzzed

pytestmark = hardship

NUM_EXAMPLES = size("FUZZ_EXAMPLES", 50) * 2
# Every code point except surrogates, which UTF-8, and so a message, cannot contain.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
CHARACTERS = st.characters(exclude_categories=["Cs"])
REPEATED = st.builds(lambda text, times: text * times, st.text(CHARACTERS, max_size=4), st.integers(1, 700))


@fuzzed(NUM_EXAMPLES)
@given(st.one_of(TEXTS, TEXTS, REPEATED))
@example("\u0000")
@example("\ufeff\u200b\u200d\u2028")
@example("A" * 3000)
def test_shipped_tokenizer_decodes_to_the_normalised_text(text: str) -> None:
    check_text(shipped_tokenizer(), text)


@pytest.mark.parametrize("target", TARGETS)
def test_random_bytes_are_read_or_refused(target: str) -> None:
    seeds = SEEDS[target]()

    @fuzzed(NUM_EXAMPLES)
    @given(st.one_of(st.binary(max_size=300), st.sampled_from(seeds).flatmap(_bent)))
    def holds(data: bytes) -> None:
        TARGETS[target](data)

    holds()


def _bent(seed: bytes) -> st.SearchStrategy[bytes]:
    """Replace some bytes of a seed."""
    changes = st.dictionaries(st.integers(0, len(seed) - 1), st.integers(0, 255), max_size=8)
    return changes.map(lambda found: bytes(found.get(at, byte) for at, byte in enumerate(seed)))
