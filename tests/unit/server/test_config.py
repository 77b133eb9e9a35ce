"""Settings: their sources, several models, refusals by name, a printed form that reads back, and engine limits."""

import argparse
import dataclasses
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

from antiphon.domain.limits import ALLOWED, DEFAULT_LIMITS, EngineLimits
from antiphon.server import settings as config
from antiphon.server.settings import ConfigError, ModelSettings, ServerConfig
from antiphon.server.settings_sources import add_config_arguments, flag_of, load_config, to_toml
from antiphon.tools.capacity.flags import add_limit_flag


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*config.fields(), "config"):
        monkeypatch.delenv(f"ANTIPHON_{name.upper()}", raising=False)


def load(*flags: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    return load_config(parser.parse_args(flags))


def test_load_config_uses_defaults_when_nothing_is_set() -> None:
    assert (load().port, load().bundle) == (50051, config.SHIPPED_BUNDLE)
    assert load("some/where").bundle == Path("some/where")


def test_load_config_prefers_flags_to_environment_to_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "antiphon.toml"
    file.write_text("port = 1\nmetrics_port = 1\nmax_num_seqs = 1\n")
    monkeypatch.setenv("ANTIPHON_CONFIG", str(file))
    monkeypatch.setenv("ANTIPHON_PORT", "2")
    monkeypatch.setenv("ANTIPHON_METRICS_PORT", "2")
    loaded = load("--port", "3")
    assert (loaded.port, loaded.metrics_port, loaded.max_num_seqs) == (3, 2, 1)


def test_load_config_prefers_config_flag_to_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = tmp_path / "chosen.toml"
    chosen.write_text("port = 7\n")
    monkeypatch.setenv("ANTIPHON_CONFIG", str(tmp_path / "absent.toml"))
    assert load("--config", str(chosen)).port == 7


def test_load_config_takes_equal_ports_only_when_they_are_chosen_later_or_on_other_hosts() -> None:
    assert load("--port", "0", "--metrics-port", "0").port == 0
    assert load("--port", "7000", "--metrics-port", "7000", "--metrics-host", "127.0.0.2").metrics_port == 7000


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("THREADS", "many", r"threads \(from ANTIPHON_THREADS\) is 'many'"),
        *(("MODELS", text, r"models\S* \(from ANTIPHON_MODELS\)") for text in ("{", "5", '{"de": {}}')),
    ],
)
def test_load_config_names_variable_when_environment_is_malformed(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    monkeypatch.setenv(f"ANTIPHON_{name}", text)
    with pytest.raises(ConfigError, match=message):
        load()


def test_load_config_names_file_when_it_is_absent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml cannot be read: No such file"):
        load("--config", str(tmp_path / "absent.toml"))


def test_to_toml_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    original = load('od"d\\näme', "--port", "0", "--precision", "int8", "--drain-grace-s", "1.5")
    file = tmp_path / "printed.toml"
    file.write_text(to_toml(original), encoding="utf-8")
    assert load("--config", str(file)).model_dump() == original.model_dump()


def test_to_toml_covers_every_field() -> None:
    text = to_toml(load())
    unset = {line.split()[1] for line in text.splitlines() if line.startswith("#")}
    assert set(tomllib.loads(text)) | unset == set(config.fields())


def test_add_config_arguments_offers_one_described_flag_for_each_field() -> None:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    text = parser.format_help()
    for name, field in config.fields().items():
        assert f"  {flag_of(name)} " in text
        assert field.description


def test_server_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load("--device", "auto", "--workers", "auto").port = 1


def test_load_config_ignores_variables_that_are_not_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets ANTIPHON_SERVICE_HOST in every pod beside a Service named antiphon."""
    monkeypatch.setenv("ANTIPHON_SERVICE_HOST", "10.0.0.1")
    assert load().host == "127.0.0.1"


TOML = """
threads = 2
max_num_seqs = 32
[models.de]
path = "/bundles/de"
max_num_seqs = 8
kv_cache_blocks = 100
[models."fr-1.5"]
path = "/bundles/fr"
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "antiphon.toml"
    file.write_text(TOML)
    return file


def test_settings_without_models_plan_the_bundle_under_its_own_name() -> None:
    (plan,) = load("some/where", "--max-num-seqs", "3").plans
    assert (plan.name, plan.path, plan.limits.max_num_seqs) == (None, Path("some/where"), 3)


def test_model_flags_plan_each_model_in_the_order_given() -> None:
    plans = load("--model", "z=/z", "--model", "a=rel/a=b", "--threads", "3").plans
    assert [(plan.name, plan.path, plan.threads) for plan in plans] == [("z", Path("/z"), 3), ("a", Path("rel/a=b"), 3)]


def test_models_of_toml_use_their_own_limits_or_those_of_the_server(toml: Path) -> None:
    de, fr = load("--config", str(toml)).plans
    assert (de.limits.max_num_seqs, de.limits.kv_cache_blocks, de.threads) == (8, 100, 2)
    assert (fr.name, fr.limits.max_num_seqs, fr.limits.kv_cache_blocks, fr.threads) == ("fr-1.5", 32, None, 2)


def test_model_flags_come_first_and_keep_the_limits_of_the_file(toml: Path) -> None:
    plans = load("--config", str(toml), "--model", "it=/bundles/it", "--model", "de=/other").plans
    assert [(plan.name, plan.path) for plan in plans] == [
        ("it", Path("/bundles/it")),
        ("de", Path("/other")),
        ("fr-1.5", Path("/bundles/fr")),
    ]
    assert plans[1].limits.max_num_seqs == 8


def test_models_of_the_environment_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_MODELS", '{"de": {"path": "/de", "precision": "float32"}, "fr": "/fr"}')
    plans = load().plans
    assert [(plan.name, plan.path, plan.precision) for plan in plans] == [
        ("de", Path("/de"), "float32"),
        ("fr", Path("/fr"), None),
    ]


def test_to_toml_reads_models_back(toml: Path, tmp_path: Path) -> None:
    original = load("--config", str(toml), "--memory-limit-bytes", "5000000", "--admin-port", "0")
    file = tmp_path / "printed.toml"
    file.write_text(to_toml(original), encoding="utf-8")
    again = load("--config", str(file))
    assert again.plans == original.plans
    assert (again.memory_limit_bytes, again.admin_port) == (5_000_000, 0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--port 70000", r"port \(from --port\) is '70000'; it must be a whole number from 0 to 65535"),
        ("--port http", r"port \(from --port\) is 'http'; it must be a whole number"),
        ("--max-stream-messages-per-s 0", r"\(from --max-stream-messages-per-s\) is '0'; .* a whole number from 1"),
        ("--precision int2", r"precision .* is 'int2'; it must be one of float32, int8, int4"),
        ("--host=", r"host .* is ''; it must be a text that is not empty"),
        ("--kv-cache-blocks 0", r"kv_cache_blocks .* is '0'; it must be a whole number from 1"),
        ("--device gpu", r"device \(from --device\) is 'gpu'; it must be one of cpu, cuda, auto"),
        ("--device cuda --workers 2", "workers is 2 and device is cuda; one process serves a GPU"),
        ("--port 7000 --metrics-port 7000", "metrics_port is 7000; it must differ from port"),
        ("one --bundle two", "bundle is given twice: one and --bundle two"),
        ("--model de", "--model is 'de'; it must be NAME=PATH"),
        ("--model =x", "--model is '=x'; it must be NAME=PATH"),
        ("--model de=", "--model is 'de='; it must be NAME=PATH"),
        ("--model de=x --model de=y", "--model names 'de' twice"),
        ("--model a/b=x", r"models \(from --model\) names 'a/b'; a name is 1 to 64 letters"),
        ("bundle --model de=x", "bundle is bundle and there are models; give one or the other"),
        ("--admin-port 7000 --port 7000", "admin_port is 7000; it must differ from port"),
        ("--admin-port 9090", "admin_port is 9090; it must differ from metrics_port"),
        ("--admin-port -1", r"admin_port \(from --admin-port\) is '-1'; it must be a whole number from 0 to 65535"),
        ("--memory-limit-bytes 0", r"memory_limit_bytes .* is '0'; it must be a whole number from 1 to"),
    ],
)
def test_load_config_names_field_value_and_range_when_flags_are_wrong(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*flags.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"prot = 1", r"prot \(from .*antiphon.toml\) is not a setting"),
        (b"port = ", "is not TOML"),
        (b"\xff", "is not TOML"),
        (b"[models.de]\nmax_num_seqs = 8", r"models.de.path \(from .*\.toml\) is missing; it must be the directory"),
        (
            b"[models.de]\npath = 'x'\nmax_num_seqs = 0",
            r"models.de.max_num_seqs \(from .*\.toml\) is 0; it must be a",
        ),
        (b"[models.de]\npath = 'x'\nprecision = 'int2'", r"models.de.precision .* is 'int2'; it must be one of f"),
        (b"[models.de]\npath = 'x'\nport = 1", r"models.de.port .* is not a setting of a model; .* one of path, "),
        (b"[models]\nde = 5", r"models.de .* is not a setting of a model; it must be a table with a path"),
        (b"models = 5", r"models \(from .*\) is 5; it must be a table of models by name"),
    ],
)
def test_load_config_names_field_and_file_when_toml_is_wrong(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "antiphon.toml"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        load("--config", str(file))


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
