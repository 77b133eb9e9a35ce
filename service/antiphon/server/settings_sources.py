"""Sources of a server's settings: flags, environment variables and a TOML file. Errors name the wrong setting.

Flags take precedence over `ANTIPHON_*` variables, those over the TOML file, and that over the defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsError

from antiphon.server.settings import (
    ENV_PREFIX,
    SHIPPED_BUNDLE,
    ConfigError,
    ModelSettings,
    ServerConfig,
    contradiction,
    fields,
)

CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each field, a positional bundle, --config and --print-config."""
    parser.add_argument(
        "bundle_path", nargs="?", metavar="BUNDLE", help="the same as --bundle (default: the English-German one)"
    )
    parser.add_argument("--config", metavar="FILE", help=f"TOML file of settings (also {CONFIG_VARIABLE})")
    parser.add_argument("--print-config", action="store_true", help="print the settings in effect as TOML, and exit")
    group = parser.add_argument_group("settings", f"each also as {ENV_PREFIX}NAME, and as `name` in the TOML file")
    schemas = _schemas()
    for name, field in fields().items():
        schema = schemas[name]
        action = "append" if name == "models" else "store"
        group.add_argument(flag_of(name), dest=name, action=action, metavar=_metavar(schema), help=_help(field, schema))


def load_config(arguments: argparse.Namespace) -> ServerConfig:
    """Combine flags, environment and TOML file. Raises ConfigError on the first field that is wrong."""
    flags = _flags(arguments)
    config_file = arguments.config or os.environ.get(CONFIG_VARIABLE) or None
    table = _read_toml(Path(config_file)) if config_file else {}

    class Layered(ServerConfig):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, table)

    try:
        config = Layered(**flags)
    except SettingsError as error:  # only `models` is parsed as JSON
        raise ConfigError(f"models (from {ENV_PREFIX}MODELS) is not JSON: {error.__cause__}") from None
    except ValidationError as error:
        raise ConfigError(_explain(error, flags, config_file)) from None
    _check_ports(config)
    if config.fronts and config.workers not in (1, "auto"):
        raise ConfigError(f"fronts is {config.fronts} and workers is {config.workers}; with fronts workers must be 1")
    if config.device != "cpu" and config.workers not in (1, "auto"):
        raise ConfigError(f"workers is {config.workers} and device is {config.device}; one process serves a GPU")
    if problem := contradiction(config, has_admin=config.admin_port is not None):
        raise ConfigError(problem)
    if config.models and "bundle" in config.model_fields_set:
        raise ConfigError(f"bundle is {config.bundle} and there are models; give one or the other")
    # Sources are merged in rising order of precedence. The default model is the first of the highest one.
    first = [name for name in flags.get("models", ()) if name in config.models]
    return config.model_copy(update={"models": {name: config.models[name] for name in (*first, *config.models)}})


def _check_ports(config: ServerConfig) -> None:
    """Raise ConfigError if two listeners share a port and an address."""
    listeners = {(config.host, config.port): "port"}
    for field in ("metrics", "admin", "probe"):
        host, port = getattr(config, f"{field}_host"), getattr(config, f"{field}_port")
        if port and (user := listeners.setdefault((host, port), f"{field}_port")) != f"{field}_port":
            raise ConfigError(f"{field}_port is {port}; it must differ from {user}, on the same address")


def to_toml(config: ServerConfig) -> str:
    """Return the configuration as TOML that --config can read; unset fields become comments."""
    values = {name: getattr(config, name) for name in fields() if name != "models"}
    if config.models:
        values["bundle"] = None
    lines = [_toml_line(name, value) for name, value in values.items()]
    if not config.models:
        lines.append(_toml_line("models", None))
    for name, settings in config.models.items():
        lines += ["", f"[models.{json.dumps(name)}]"]
        lines += [_toml_line(field, getattr(settings, field)) for field in ModelSettings.model_fields]
    return "\n".join(lines) + "\n"


def _toml_line(name: str, value: object) -> str:
    if value is None:
        return f"# {name} is unset"
    if isinstance(value, bool):
        return f"{name} = {str(value).lower()}"
    literal = value if isinstance(value, int | float) else json.dumps(str(value), ensure_ascii=False)
    return f"{name} = {literal}"


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    values = {name: getattr(arguments, name) for name in fields() if getattr(arguments, name) is not None}
    if arguments.bundle_path is not None:
        if "bundle" in values:
            raise ConfigError(f"bundle is given twice: {arguments.bundle_path} and --bundle {values['bundle']}")
        values["bundle"] = arguments.bundle_path
    if "models" in values:
        try:
            values["models"] = read_model_flags(values["models"])
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return values


def read_model_flags(flags: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
    """Return the settings of all `--model NAME=PATH` flags. Raises ValueError naming the wrong flag."""
    settings: dict[str, Mapping[str, str]] = {}
    for flag in flags:
        name, separator, path = flag.partition("=")
        if not (name and separator and path):
            raise ValueError(f"--model is {flag!r}; it must be NAME=PATH, a name and the directory of a bundle")
        if name in settings:
            raise ValueError(f"--model names {name!r} twice")
        settings[name] = {"path": path}
    return settings


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _explain(error: ValidationError, flags: Mapping[str, Any], config_file: str | None) -> str:
    first = error.errors()[0]
    name, *inner = map(str, first["loc"])
    origin = _origin(name, inner, flags, config_file)
    if name not in fields():
        return f"{name} (from {origin}) is not a setting; the settings are {', '.join(fields())}"
    if name == "models" and inner:
        return _explain_model(inner, origin, first["type"], first["input"])
    return f"{name} (from {origin}) is {first['input']!r}; it must be {_allowed(_schemas()[name])}"


def _explain_model(inner: list[str], origin: str, kind: str, value: object) -> str:
    """Return a message about a wrong model name or a wrong setting of a model. inner: path in `models`."""
    name, *rest = inner
    field, settings = rest[0] if rest else "", ModelSettings.model_fields
    if field == "[key]":
        return (
            f"models (from {origin}) names {name!r}; a name is 1 to 64 letters, digits, dots, underscores and hyphens"
        )
    path = ".".join(["models", name, *rest[:1]])  # beyond the field there are only names of its possible types
    if kind == "missing":
        return f"{path} (from {origin}) is missing; it must be the directory of a bundle"
    if field not in settings:
        expected = "a table with a path" if not field else f"one of {', '.join(settings)}"
        return f"{path} (from {origin}) is not a setting of a model; it must be {expected}"
    return f"{path} (from {origin}) is {value!r}; it must be {allowed_of_model(field)}"


def _origin(name: str, inner: list[str], flags: Mapping[str, Any], config_file: str | None) -> str:
    """Return the origin of a value: a flag, a variable or the file. inner: path in `models`, for that setting."""
    variable = f"{ENV_PREFIX}{name.upper()}"
    if name in flags and (
        name != "models" or (inner and inner[0] in flags[name] and inner[1:] in (["path"], ["[key]"]))
    ):
        return flag_of(name)
    return variable if os.environ.get(variable) else str(config_file)


def _schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each field; for an optional field, the schema of its value."""
    return _value_schemas(ServerConfig)


def allowed_of_model(field: str) -> str:
    """Return the allowed values of a field of ModelSettings in words."""
    return _allowed(_value_schemas(ModelSettings)[field])


def _value_schemas(kind: type[BaseModel]) -> dict[str, dict[str, Any]]:
    properties: dict[str, dict[str, Any]] = kind.model_json_schema()["properties"]
    return {name: _value_schema(schema.get("anyOf", [schema])) for name, schema in properties.items()}


def _value_schema(kinds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the first of several kinds of values, with the words that may stand in its place."""
    return kinds[0] | {"words": [kind["const"] for kind in kinds[1:] if "const" in kind]}


def _allowed(schema: Mapping[str, Any]) -> str:
    """Return the allowed values of a field in words."""
    if choices := schema.get("enum"):
        return f"one of {', '.join(choices)}"
    if schema["type"] == "object":
        return "a table of models by name, each with a path"
    if pattern := schema.get("pattern"):
        return f"a text that matches {pattern}"
    if schema["type"] == "string":
        return "a text that is not empty"
    if schema["type"] == "boolean":
        return "true or false"
    kind = "a whole number" if schema["type"] == "integer" else "a number"
    return " or ".join([f"{kind} from {schema['minimum']} to {schema['maximum']}", *schema["words"]])


def _help(field: FieldInfo, schema: Mapping[str, Any]) -> str:
    text = (field.description or "").rstrip(".").replace("%", "%%")
    text = text[0].lower() + text[1:]
    if choices := schema.get("enum"):
        text += f": {', '.join(choices)}"
    if field.default_factory is not None or field.default in (None, SHIPPED_BUNDLE):
        return text
    default = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return f"{text} (default: {default})"


def _metavar(schema: Mapping[str, Any]) -> str:
    if schema.get("format") in ("path", "file"):
        return "DIR" if schema["format"] == "path" else "FILE"
    if schema["type"] == "boolean":
        return "BOOL"
    if schema["type"] == "object":
        return "NAME=PATH"
    return "TEXT" if schema["type"] == "string" else "N"


def flag_of(name: str) -> str:
    """Return the flag of a field; for models it is --model, which is given once per model."""
    return "--model" if name == "models" else f"--{name.replace('_', '-')}"
