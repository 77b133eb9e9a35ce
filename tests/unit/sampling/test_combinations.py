"""Rules of combinations: each one is violated alone, valid combinations pass, and the docs state the defaults."""

import re
from pathlib import Path
from typing import Any

import pytest

from antiphon.controls.rules import RULES
from antiphon.controls.table import EarlyStopping
from antiphon.domain.errors import InvalidArgument
from antiphon.domain.sampling_params import Controls, SamplingParams, check_combination
from antiphon.rpc.v1.options import default_options

CONTROLS_MD = Path(__file__).resolve().parents[3] / "docs" / "CONTROLS.md"
BEAMS: dict[str, Any] = dict(beam_width=4)

# One violation of each rule, in the rules' order: parameters, and other settings of the request.
BREACHES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("temperature", dict(temperature=0.5, **BEAMS), {}),
    ("top_k", dict(top_k=5, **BEAMS), {}),
    ("top_p", dict(top_p=0.5, **BEAMS), {}),
    ("min_p", dict(min_p=0.5, **BEAMS), {}),
    ("typical_p", dict(typical_p=0.5, **BEAMS), {}),
    ("num_return_sequences", dict(num_return_sequences=5, **BEAMS), {}),
    ("num_logprobs", dict(num_logprobs=1, **BEAMS), {}),
    ("stop_strings", BEAMS, dict(stop_strings=["x"])),
    ("num_return_sequences", dict(num_return_sequences=2), {}),
    ("typical_p", dict(typical_p=0.5), {}),
    ("length_penalty", dict(length_penalty=0.5), {}),
    ("early_stopping", dict(early_stopping=EarlyStopping.NEVER), {}),
    ("min_new_tokens", dict(min_new_tokens=5, max_new_tokens=4), {}),
    ("forced_first_id", dict(forced_first_id=5, suppressed_ids=(4, 5)), {}),
    ("forced_first_id", dict(forced_first_id=5, allowed_ids=(4, 6)), {}),
    ("use_shortlist", dict(use_shortlist=True, allowed_ids=(4, 6)), {}),
    ("prefix_ids", {}, dict(prefix_text="a", prefix_ids=[5])),
]

HARMLESS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(top_k=5, top_p=0.5, min_p=0.5), {}),  # each keeps the most likely token
    (dict(seed=5), {}),
    (dict(seed=5, num_logprobs=0, num_return_sequences=4, length_penalty=-1.0, **BEAMS), {}),
    (dict(early_stopping=EarlyStopping.FIRST, stop_ids=(5,), min_new_tokens=2, **BEAMS), dict(prefix_text="a")),
    (dict(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0, no_repeat_ngram_size=2, **BEAMS), {}),
    (dict(ignore_eos=True, min_new_tokens=5), dict(stop_strings=["x"])),
    (dict(temperature=1.0, num_return_sequences=3, top_k=5, typical_p=0.5), dict(stop_strings=["x"])),
    (dict(min_new_tokens=5, max_new_tokens=5), {}),
    (dict(forced_first_id=5, allowed_ids=(5,), suppressed_ids=(6,)), {}),
    (dict(allowed_ids=(5,), suppressed_ids=(5,)), dict(prefix_ids=[])),
]


@pytest.mark.parametrize(("rule", "breach"), list(zip(RULES, BREACHES, strict=True)))
def test_each_rule_refuses_its_combination(rule: Any, breach: tuple[str, dict[str, Any], dict[str, Any]]) -> None:
    field, params, beside = breach
    with pytest.raises(InvalidArgument) as caught:
        check_combination(Controls(params=SamplingParams(**params), **beside))
    assert caught.value.field == rule.field == field
    assert f"it must be {rule.allowed} if {rule.condition}" in str(caught.value)


@pytest.mark.parametrize(("params", "beside"), HARMLESS)
def test_harmless_combinations_pass(params: dict[str, Any], beside: dict[str, Any]) -> None:
    check_combination(Controls(params=SamplingParams(**params), **beside))


def test_docs_state_the_defaults_that_get_model_reports() -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([\w.]+)", CONTROLS_MD.read_text(encoding="utf-8"), flags=re.MULTILINE)
    documented = {name: value for name, value in rows if re.fullmatch(r"[\d.]+", value)}
    defaults = default_options()
    numbers = {
        field.name: value
        for field, value in defaults.ListFields()
        if not isinstance(value, bool) and field.name != "early_stopping"
    }
    assert {name: float(documented[name]) for name in numbers} == numbers
