"""A model's defaults combined with the options of a request."""

from __future__ import annotations

from typing import Any

import pytest

from antiphon.bundle.manifest import GenerationDefaults
from antiphon.controls.table import EarlyStopping
from antiphon.domain.errors import InvalidArgument
from antiphon.domain.sampling_params import SamplingParams
from antiphon.rpc.v1.options import default_options, read_options
from antiphon.v1 import inference_pb2 as pb

VOCAB_SIZE = 100
BEAMS = GenerationDefaults(
    beam_width=4, length_penalty=0.6, early_stopping="first", max_new_tokens=60, suppressed_ids=(7,), forced_first_id=9
)
SAMPLES = GenerationDefaults(temperature=0.7, top_k=50, top_p=0.9)


def params(generation: GenerationDefaults, **given: Any) -> SamplingParams:
    return read_options(pb.GenerateOptions(seed=1, **given), VOCAB_SIZE, generation).params


def test_absent_options_get_the_defaults_of_the_model() -> None:
    expected = SamplingParams(
        seed=1, beam_width=4, length_penalty=0.6, early_stopping=EarlyStopping.FIRST, max_new_tokens=60,
        suppressed_ids=(7,), forced_first_id=9,
    )  # fmt: skip
    assert params(BEAMS) == expected


def test_option_replaces_the_default_of_the_model() -> None:
    found = params(BEAMS, max_new_tokens=5, suppressed_ids=[8], length_penalty=1.5)
    assert (found.max_new_tokens, found.suppressed_ids, found.length_penalty) == (5, (8,), 1.5)
    assert found.beam_width == 4


@pytest.mark.parametrize(
    "given", [{"temperature": 0.8}, {"beam_width": 1}, {"stop_strings": ["."]}, {"num_logprobs": 2}]
)
def test_options_that_exclude_beams_drop_the_defaults_of_beams(given: dict[str, Any]) -> None:
    found = params(BEAMS, **given)
    assert (found.beam_width, found.length_penalty, found.early_stopping) == (1, 1.0, EarlyStopping.HEURISTIC)
    assert (found.max_new_tokens, found.suppressed_ids, found.forced_first_id) == (60, (7,), 9)


def test_beams_drop_a_default_of_samples() -> None:
    assert params(SAMPLES, beam_width=3) == SamplingParams(seed=1, beam_width=3)


def test_min_new_tokens_drops_a_lower_default_limit_and_keeps_what_it_needs() -> None:
    found = params(BEAMS, min_new_tokens=80, length_penalty=0.9)
    assert (found.max_new_tokens, found.beam_width, found.length_penalty) == (None, 4, 0.9)


def test_prefix_drops_the_forced_first_token() -> None:
    controls = read_options(pb.GenerateOptions(prefix_ids=pb.TokenIds(ids=[5])), VOCAB_SIZE, BEAMS)
    assert controls.params.forced_first_id is None
    assert controls.params.beam_width == 4


def test_options_that_exclude_each_other_are_refused_with_any_defaults() -> None:
    with pytest.raises(InvalidArgument, match=r"options\.temperature.*beam_width is above 1"):
        params(SAMPLES, temperature=1.0, beam_width=2)


def test_get_model_reports_defaults_that_change_nothing_when_sent_back() -> None:
    reported = default_options(BEAMS)
    assert (reported.beam_width, reported.early_stopping) == (4, pb.EARLY_STOPPING_FIRST)
    reported.seed = 1
    assert read_options(reported, VOCAB_SIZE, BEAMS).params == params(BEAMS)
