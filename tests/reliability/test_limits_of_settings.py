"""Every setting of a server, tested below, at and above its limits as a flag of `antiphon serve`."""

import math
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli.main import main
from antiphon.server.settings import SHIPPED_BUNDLE, ModelSettings, ServerConfig, fields
from antiphon.server.settings_sources import flag_of

pytestmark = pytest.mark.hardship

# Settings whose values have no limits of their own; other tests check them.
FREE_TEXTS = {"models", "caller_metadata_key", "otlp_endpoint"}
FILES = ("path", "file")
# Other settings that a setting needs.
BESIDE: dict[str, tuple[str, ...]] = {
    "max_connection_age_grace_s": ("--max-connection-age-s=1",),
    "metrics_tls": ("--tls-cert=cert.pem", "--tls-key=key.pem"),
}
SCHEMAS: dict[str, dict[str, Any]] = {
    name: schema.get("anyOf", [schema])[0] for name, schema in ServerConfig.model_json_schema()["properties"].items()
}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*fields(), "config"):
        monkeypatch.delenv(f"ANTIPHON_{name.upper()}", raising=False)


def bounds(schema: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return values just inside and just outside the limits, or none if the setting has no limits."""
    if choices := schema.get("enum"):
        return list(choices), [*(choice.upper() for choice in choices), "", "other"]
    if "minimum" in schema and "maximum" in schema:
        low, high = schema["minimum"], schema["maximum"]
        if schema["type"] == "integer":
            return [low, low + 1, high - 1, high], [low - 1, high + 1, "1.5", "many", "nan", ""]
        inside = [low, math.nextafter(low, math.inf), math.nextafter(high, low), high]
        outside = [math.nextafter(low, -math.inf), math.nextafter(high, math.inf), "nan", "inf", "-inf", "many", ""]
        return inside, outside
    if schema["type"] == "boolean":
        return ["true", "false"], ["perhaps", "2", ""]
    if "minLength" in schema:
        return ["x"], [""]
    return [], []


def cases(*, are_inside: bool) -> list[Any]:
    return [
        pytest.param(name, str(value), id=f"{name}={value}")
        for name, schema in SCHEMAS.items()
        for value in bounds(schema)[0 if are_inside else 1]
    ]


def test_every_setting_has_limits_or_names_a_file() -> None:
    boundless = {
        name for name, schema in SCHEMAS.items() if not bounds(schema)[0] and schema.get("format") not in FILES
    }
    assert boundless <= FREE_TEXTS


@pytest.mark.parametrize(("name", "value"), cases(are_inside=True))
def test_settings_are_accepted_up_to_their_limits(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", f"{flag_of(name)}={value}", *BESIDE.get(name, ()), "--print-config"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert f"{name} = " in printed.out


@pytest.mark.parametrize(("name", "value"), cases(are_inside=False))
def test_settings_beyond_limits_stop_the_server(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", f"{flag_of(name)}={value}", *BESIDE.get(name, ())]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"antiphon serve: {name} (from {flag_of(name)}) is {value!r}; it must be ")
    schema = SCHEMAS[name]
    if "minimum" in schema:
        assert f"from {schema['minimum']} to {schema['maximum']}" in line


@pytest.mark.parametrize("name", [name for name in ModelSettings.model_fields if name != "path"])
def test_settings_of_a_model_have_the_limits_of_the_server(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    schemas = ModelSettings.model_json_schema()["properties"]
    assert schemas[name].get("anyOf", [schemas[name]])[0] == {
        key: value for key, value in SCHEMAS[name].items() if key not in ("default", "description", "title")
    }
    file = tmp_path / "antiphon.toml"
    outside = next(value for value in bounds(SCHEMAS[name])[1] if value != "")
    shown = f'"{outside}"' if isinstance(outside, str) else outside
    file.write_text(f'[models.a]\npath = "{SHIPPED_BUNDLE}"\n{name} = {shown}\n')
    assert main(["serve", "--config", str(file)]) == 2
    assert f"models.a.{name} (from {file}) is {outside!r}; it must be " in capsys.readouterr().err
