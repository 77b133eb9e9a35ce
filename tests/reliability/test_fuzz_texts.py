"""Random texts for tokenizers, random bytes for readers, and short runs guided by coverage; see fuzz_targets.py."""

import importlib.util
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.integration.process import environment
from tests.reliability.fuzz_targets import SEEDS, TARGETS, check_text, shipped_tokenizer
from tests.reliability.sizes import size
from tests.reliability.test_fuzz_messages import fuzzed

pytestmark = pytest.mark.hardship

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


SECONDS = size("FUZZ_S", 0)
RUNS = 300


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="Atheris is not published for this platform")
@pytest.mark.parametrize("target", TARGETS)
def test_fuzz_target_finds_no_error(target: str) -> None:
    limits = ["--seconds", str(SECONDS)] if SECONDS else ["--runs", str(RUNS), "--seed", "1"]
    command = [sys.executable, "-m", "tests.reliability.fuzz", target, *limits]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=SECONDS + 120, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Done " in result.stderr
