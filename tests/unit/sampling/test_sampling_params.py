"""Every control's range, from both ends; NaN is outside all of them."""

import dataclasses
import math
from typing import Any

import pytest

from antiphon.controls.table import MAX_BEAM_WIDTH, MAX_NUM_LOGPROBS, MAX_SEED, EarlyStopping
from antiphon.domain.errors import InvalidArgument
from antiphon.domain.sampling_params import SamplingParams, check_token_ids

TOO_SMALL = math.nextafter(0, -1)

# Other options that a control needs.
COMPANY: dict[str, dict[str, Any]] = {
    "typical_p": dict(temperature=1.0),
    "length_penalty": dict(beam_width=2),
    "num_return_sequences": dict(temperature=1.0),
    "min_new_tokens": dict(max_new_tokens=2**31 - 1),
}

INSIDE: dict[str, list[Any]] = {
    "max_new_tokens": [None, 1, 2**31 - 1],
    "min_new_tokens": [0, 1, 2**31 - 1],
    "time_limit_s": [None, 0.001, 1e6],
    "temperature": [0.0, 1e-30, 100.0],
    "top_k": [0, 1, 2**31 - 1],
    "top_p": [1e-30, 1.0],
    "min_p": [0.0, 1.0],
    "typical_p": [1e-30, 1.0],
    "seed": [0, MAX_SEED],
    "num_return_sequences": [1, 64],
    "beam_width": [1, MAX_BEAM_WIDTH],
    "length_penalty": [-10.0, 10.0],
    "repetition_penalty": [1e-6, 100.0],
    "presence_penalty": [-100.0, 100.0],
    "frequency_penalty": [-100.0, 100.0],
    "no_repeat_ngram_size": [0, 1, 2**31 - 1],
    "logit_bias": [(), ((0, -1e6), (1, 1e6)), tuple((i, 0.5) for i in range(1024))],
    "suppressed_ids": [(), (1,) * 1024],
    "allowed_ids": [(), (1,) * 1024],
    "stop_ids": [(), (1,) * 16],
    "num_logprobs": [None, 0, MAX_NUM_LOGPROBS],
}

OUTSIDE: dict[str, list[Any]] = {
    "max_new_tokens": [0, -1],
    "min_new_tokens": [-1],
    "time_limit_s": [0.0, -1.0, math.nan],
    "temperature": [TOO_SMALL, 100.1, math.inf, math.nan],
    "top_k": [-1],
    "top_p": [0.0, 1.1, math.nan],
    "min_p": [TOO_SMALL, 1.1, math.nan],
    "typical_p": [0.0, 1.1, math.nan],
    "seed": [-1, MAX_SEED + 1],
    "num_return_sequences": [0, -1],
    "beam_width": [0, MAX_BEAM_WIDTH + 1],
    "length_penalty": [-10.1, 10.1, math.nan],
    "repetition_penalty": [0.0, 100.1, math.nan],
    "presence_penalty": [-100.1, 100.1, math.nan],
    "frequency_penalty": [-100.1, 100.1, math.nan],
    "no_repeat_ngram_size": [-1],
    "logit_bias": [((5, math.nan),), ((5, 1.1e6),), ((5, -math.inf),), ((5, 1.0), (5, 1.0)), ((1, 0.0),) * 1025],
    "suppressed_ids": [(1,) * 1025],
    "allowed_ids": [(1,) * 1025],
    "stop_ids": [(1,) * 17],
    "num_logprobs": [-1, MAX_NUM_LOGPROBS + 1],
}


def cases(table: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(field, value) for field, values in table.items() for value in values]


@pytest.mark.parametrize(("field", "value"), cases(INSIDE))
def test_sampling_params_accept_both_ends_of_each_range(field: str, value: Any) -> None:
    assert getattr(SamplingParams(**{**COMPANY.get(field, {}), field: value}), field) == value


@pytest.mark.parametrize(("field", "value"), cases(OUTSIDE))
def test_sampling_params_name_the_field_when_a_value_is_out_of_range(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{field} is .*; it must be ") as caught:
        SamplingParams(**{**COMPANY.get(field, {}), field: value})
    assert caught.value.field == field


def test_every_field_with_a_range_is_tested() -> None:
    rest = {"early_stopping", "forced_first_id", "ignore_eos", "use_shortlist"}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields == INSIDE.keys() | rest == OUTSIDE.keys() | rest


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", ((3, 1.0), (10, 1.0))),
        ("forced_first_id", 10),
        ("forced_first_id", -1),
        ("suppressed_ids", (1, 2, 10)),
        ("allowed_ids", (10,)),
        ("stop_ids", (4, 2**31)),
    ],
)
def test_check_token_ids_names_the_field_of_an_id_outside_the_vocabulary(field: str, value: Any) -> None:
    params = SamplingParams(**{field: value})
    with pytest.raises(InvalidArgument, match="token ids from 0 to 9") as caught:
        check_token_ids(params, 10)
    assert caught.value.field == field


def test_check_token_ids_accepts_every_id_of_the_vocabulary() -> None:
    ids = tuple(range(10))
    params = SamplingParams(logit_bias=((0, 1.0), (9, 1.0)), forced_first_id=9, allowed_ids=ids, stop_ids=ids)
    check_token_ids(params, 10)
    check_token_ids(SamplingParams(suppressed_ids=ids), 10)


def test_num_rows_counts_beams_or_samples() -> None:
    assert SamplingParams(beam_width=4, num_return_sequences=2, early_stopping=EarlyStopping.NEVER).num_rows == 4
    assert SamplingParams(temperature=1.0, num_return_sequences=3).num_rows == 3
