"""Refusal of requests before they run: token ids outside the vocabulary, and sources that are too long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from antiphon.domain.errors import InvalidArgument
from antiphon.domain.limits import EncodeBudget
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.scheduling.admission import admit, limits_of
from antiphon.engine.sequences.stream import OutputStream
from tests.fakes import FakeRunner, limits_for, request_of, source_of


def check(source: int, prefix: int) -> None:
    runner = FakeRunner(vocab_size=64)
    runner.facts = replace(runner.facts, source_vocab_size=80)
    admit(request_of("a", (source,), prefix=(prefix,)), OutputStream("a"), limits_of(runner, limits_for(runner)))


async def test_admission_names_the_longest_source_when_one_is_predicted_not_to_fit() -> None:
    runner = FakeRunner(max_source_len=32)
    budget = EncodeBudget(max_bytes=1000, predict=lambda num_tokens, longest: 100 + 50 * num_tokens)  # 18 tokens
    limits = limits_of(runner, limits_for(runner, encode_budget=budget))
    for length in (17, 18):
        admit(request_of("a", source_of(target_len=3, length=length)), OutputStream("a"), limits)
    with pytest.raises(InvalidArgument, match="source is 19 tokens long; it must be 1 to 18 tokens long"):
        admit(request_of("a", source_of(target_len=3, length=19)), OutputStream("a"), limits)


async def test_admission_accepts_every_id_of_either_vocabulary() -> None:
    check(79, 63)


@pytest.mark.parametrize(("source", "prefix", "field", "highest"), [(80, 0, "source", 79), (79, 64, "prefix", 63)])
async def test_admission_names_the_vocabulary_when_an_id_is_outside_it(
    source: int, prefix: int, field: str, highest: int
) -> None:
    with pytest.raises(InvalidArgument, match=f"{field} .*from 0 to {highest}"):
        check(source, prefix)


async def test_cost_counts_every_row_at_its_requested_length() -> None:
    def cost(**controls: object) -> int:
        params = SamplingParams(max_new_tokens=24, **controls)  # type: ignore[arg-type]
        runner = FakeRunner()
        made = request_of("a", source_of(target_len=3, length=5), params=params)
        return admit(made, OutputStream("a"), limits_of(runner, limits_for(runner))).cost

    assert cost() == 5 + 5
    assert cost(min_new_tokens=12) == 5 + 12
    assert cost(ignore_eos=True) == 5 + 24
    assert cost(ignore_eos=True, temperature=1.0, num_return_sequences=8) == 5 + 8 * 24
    assert cost(ignore_eos=True, temperature=1.0, num_return_sequences=8, top_p=0.9) == 5 + 8 * 36
