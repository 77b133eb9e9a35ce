"""Several models in the settings: their sources, their own limits, and errors that name the setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.server import settings as config
from antiphon.server.settings import ConfigError
from antiphon.server.settings_sources import to_toml
from tests.unit.server.test_config import load

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


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*config.fields(), "config"):
        monkeypatch.delenv(f"ANTIPHON_{name.upper()}", raising=False)


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
        (["--model", "de"], "--model is 'de'; it must be NAME=PATH"),
        (["--model", "=x"], "--model is '=x'; it must be NAME=PATH"),
        (["--model", "de="], "--model is 'de='; it must be NAME=PATH"),
        (["--model", "de=x", "--model", "de=y"], "--model names 'de' twice"),
        (["--model", "a/b=x"], r"models \(from --model\) names 'a/b'; a name is 1 to 64 letters"),
        (["bundle", "--model", "de=x"], "bundle is bundle and there are models; give one or the other"),
        (["--admin-port", "7000", "--port", "7000"], "admin_port is 7000; it must differ from port"),
        (["--admin-port", "9090"], "admin_port is 9090; it must differ from metrics_port"),
        (
            ["--admin-port", "-1"],
            r"admin_port \(from --admin-port\) is '-1'; it must be a whole number from 0 to 65535",
        ),
        (["--memory-limit-bytes", "0"], r"memory_limit_bytes .* is '0'; it must be a whole number from 1 to"),
    ],
)
def test_load_config_names_the_setting_when_models_or_related_settings_are_wrong(
    flags: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[models.de]\nmax_num_seqs = 8", r"models.de.path \(from .*\.toml\) is missing; it must be the directory"),
        (
            "[models.de]\npath = 'x'\nmax_num_seqs = 0",
            r"models.de.max_num_seqs \(from .*\.toml\) is 0; it must be a whole",
        ),
        (
            "[models.de]\npath = 'x'\nprecision = 'int2'",
            r"models.de.precision \(from .*\) is 'int2'; it must be one of f",
        ),
        (
            "[models.de]\npath = 'x'\nport = 1",
            r"models.de.port \(from .*\) is not a setting of a model; .* one of path, ",
        ),
        ("[models]\nde = 5", r"models.de \(from .*\) is not a setting of a model; it must be a table with a path"),
        ("models = 5", r"models \(from .*\) is 5; it must be a table of models by name"),
    ],
)
def test_load_config_names_field_and_file_when_a_model_in_toml_is_wrong(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "antiphon.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load("--config", str(file))


@pytest.mark.parametrize("text", ["{", "5", '{"de": {}}'])
def test_load_config_names_the_variable_when_models_in_it_are_wrong(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ANTIPHON_MODELS", text)
    with pytest.raises(ConfigError, match=r"models\S* \(from ANTIPHON_MODELS\)"):
        load()
