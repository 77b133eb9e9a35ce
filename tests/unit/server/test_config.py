"""Settings: precedence of their sources, refusals by name, and a printed form that reads back."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

import pytest

from antiphon.server import settings as config
from antiphon.server.settings import ConfigError, ServerConfig
from antiphon.server.settings_sources import add_config_arguments, flag_of, load_config, to_toml


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*config.fields(), "config"):
        monkeypatch.delenv(f"ANTIPHON_{name.upper()}", raising=False)


def load(*flags: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    return load_config(parser.parse_args(flags))


def test_load_config_uses_defaults_when_nothing_is_set() -> None:
    assert load().port == 50051
    assert load().bundle == config.SHIPPED_BUNDLE


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


def test_load_config_reads_bundle_from_the_positional_argument() -> None:
    assert load("some/where").bundle == Path("some/where")


def test_load_config_refuses_two_bundles() -> None:
    with pytest.raises(ConfigError, match="bundle is given twice: one and --bundle two"):
        load("one", "--bundle", "two")


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--port", "70000", r"port \(from --port\) is '70000'; it must be a whole number from 0 to 65535"),
        ("--port", "http", r"port \(from --port\) is 'http'; it must be a whole number"),
        (
            "--max-stream-messages-per-s",
            "0",
            r"max_stream_messages_per_s \(from --max-stream-messages-per-s\) is '0'; it must be a whole number from 1",
        ),
        ("--precision", "int2", r"precision .* is 'int2'; it must be one of float32, int8, int4"),
        ("--host", "", r"host .* is ''; it must be a text that is not empty"),
        ("--kv-cache-blocks", "0", r"kv_cache_blocks .* is '0'; it must be a whole number from 1"),
    ],
)
def test_load_config_names_field_value_and_range_when_flag_is_wrong(flag: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(flag, value)


def test_load_config_refuses_one_port_for_both_listeners() -> None:
    with pytest.raises(ConfigError, match="metrics_port is 7000; it must differ from port"):
        load("--port", "7000", "--metrics-port", "7000")
    assert load("--port", "0", "--metrics-port", "0").port == 0
    assert load("--port", "7000", "--metrics-port", "7000", "--metrics-host", "127.0.0.2").metrics_port == 7000


def test_load_config_names_variable_when_environment_is_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_THREADS", "many")
    with pytest.raises(ConfigError, match=r"threads \(from ANTIPHON_THREADS\) is 'many'"):
        load()


def test_load_config_refuses_unknown_key_when_toml_has_one(tmp_path: Path) -> None:
    file = tmp_path / "antiphon.toml"
    file.write_text("prot = 1\n")
    with pytest.raises(ConfigError, match=r"prot \(from .*antiphon.toml\) is not a setting"):
        load("--config", str(file))


@pytest.mark.parametrize(("text", "message"), [(b"port = ", "is not TOML"), (b"\xff", "is not TOML")])
def test_load_config_names_file_when_toml_is_broken(tmp_path: Path, text: bytes, message: str) -> None:
    file = tmp_path / "antiphon.toml"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        load("--config", str(file))


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
        load().port = 1


def test_load_config_ignores_variables_that_are_not_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets ANTIPHON_SERVICE_HOST in every pod beside a Service named antiphon."""
    monkeypatch.setenv("ANTIPHON_SERVICE_HOST", "10.0.0.1")
    assert load().host == "127.0.0.1"


def test_load_config_refuses_workers_beside_a_gpu() -> None:
    with pytest.raises(ConfigError, match="workers is 2 and device is cuda; one process serves a GPU"):
        load("--device", "cuda", "--workers", "2")
    assert load("--device", "auto", "--workers", "auto").device == "auto"
    with pytest.raises(ConfigError, match=r"device \(from --device\) is 'gpu'; it must be one of cpu, cuda, auto"):
        load("--device", "gpu")
