"""Limits of an engine: defaults that are allowed, refusals by name, and the settings and flags that repeat no value."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

import pytest

from antiphon.domain.limits import ALLOWED, DEFAULT_LIMITS, EngineLimits
from antiphon.server.settings import ModelSettings, ServerConfig
from antiphon.tools.capacity.flags import add_limit_flag


def limits_with(name: str, value: Any) -> EngineLimits:
    return EngineLimits(**{name: value})


@pytest.mark.parametrize("name", ALLOWED)
def test_limits_name_field_value_and_allowed_values_when_one_is_out_of_range(name: str) -> None:
    allowed = ALLOWED[name]
    for value in (allowed.low, allowed.high):
        assert getattr(limits_with(name, value), name) == value
    fractions = [allowed.low + 0.5] if allowed.is_whole else []
    for value in (allowed.low - 1, allowed.high + 1, math.nan, *fractions):
        with pytest.raises(ValueError, match=f"^{name} is {value}; it must be {allowed.words}$"):
            limits_with(name, value)


def test_limits_count_the_blocks_of_the_longest_sequences_when_none_are_given() -> None:
    assert EngineLimits(max_num_seqs=5).num_cache_blocks(7) == 35
    assert EngineLimits(max_num_seqs=5, kv_cache_blocks=12).num_cache_blocks(7) == 12


def test_limits_for_offline_work_have_the_largest_queue_and_no_limit_of_the_wait() -> None:
    limits = EngineLimits.for_offline_work(3)
    assert (limits.max_num_seqs, limits.max_accepted_requests, limits.max_queue_time_s) == (3, 1_000_003, None)
    assert limits.max_queued_tokens == ALLOWED["max_queued_tokens"].high


def test_every_limit_is_a_setting_of_the_server_and_of_a_model() -> None:
    names = {field.name for field in dataclasses.fields(EngineLimits)} - {"encode_budget"}
    assert names == set(ALLOWED)
    assert names <= set(ServerConfig.model_fields)
    assert set(ModelSettings.model_fields) == names | {"path", "precision", "threads", "lanes"}


def test_settings_take_defaults_and_allowed_values_from_the_limits() -> None:
    server, model = (kind.model_json_schema()["properties"] for kind in (ServerConfig, ModelSettings))
    for name, allowed in ALLOWED.items():
        for schema in (server[name], model[name]):
            value = schema.get("anyOf", [schema])[0]
            assert (value["minimum"], value["maximum"]) == (allowed.low, allowed.high)
            assert value["type"] == ("integer" if allowed.is_whole else "number")
    assert ServerConfig(threads=1).limits == DEFAULT_LIMITS


@pytest.mark.parametrize("name", ["max_num_seqs", "max_queue_time_s"])
def test_flags_of_limits_take_the_values_that_a_server_takes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser, flag = argparse.ArgumentParser(), f"--{name.replace('_', '-')}"
    add_limit_flag(parser.add_argument_group("replica"), name, help_text="as in the server")
    assert getattr(parser.parse_args([]), name) == getattr(DEFAULT_LIMITS, name)
    assert getattr(parser.parse_args([flag, str(ALLOWED[name].low)]), name) == ALLOWED[name].low
    for text in ("0", "nan", "many"):
        with pytest.raises(SystemExit):
            parser.parse_args([flag, text])
        assert f"argument {flag}: '{text}'; it must be a" in capsys.readouterr().err
