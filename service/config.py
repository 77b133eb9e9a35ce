"""Every setting of a server, from flags, environment and a TOML file; a wrong value is refused by name.

Flags win over `ANTIPHON_*` variables, those over the TOML file, that over the defaults. Knows what is allowed, not
what it is used for; loads no model.
"""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

ENV_PREFIX = "ANTIPHON_"
CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"
SHIPPED_BUNDLE = Path(__file__).parent.parent / "model" / "bundles" / "en-de"

PrecisionChoice = Literal["float32", "int8"]
LoweringChoice = Literal["native", "contrib"]
LogLevel = Literal["debug", "info", "warning", "error"]
Port = Annotated[int, Field(ge=0, le=65535)]


class ConfigError(Exception):
    """A setting cannot be used; the message names the field, its value, where it came from and what is allowed."""


def usable_cores() -> int:
    """Cores this process may use: its affinity, and the container's CPU quota where there is one."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(affinity, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        return affinity


class ServerConfig(BaseSettings):
    """Settings of one server process. Frozen; names carry their units."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    bundle: Path = Field(default=SHIPPED_BUNDLE, description="Directory of the exported model to serve.")
    precision: PrecisionChoice | None = Field(
        default=None, description="Graphs of the bundle to run; unset takes int8 where the bundle has it."
    )
    lowering: LoweringChoice | None = Field(
        default=None, description="Operators of the graphs to run; unset takes native where the bundle has them."
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="Address that gRPC listens on.")
    port: Port = Field(default=50051, description="Port that gRPC listens on; 0 takes any free one.")
    metrics_host: str = Field(default="127.0.0.1", min_length=1, description="Address that /metrics listens on.")
    metrics_port: Port = Field(default=9090, description="Port that /metrics listens on; 0 takes any free one.")
    threads: int = Field(
        default_factory=usable_cores, ge=1, le=1024, description="Threads that compute one step; unset is every core."
    )
    max_num_seqs: int = Field(
        default=64, ge=1, le=4096, description="Most rows that decode together: outputs and beams."
    )
    max_num_batched_tokens: int = Field(
        default=1024, ge=1, le=1_048_576, description="Most source, prefix and judged tokens taken up in one step."
    )
    max_queued_requests: int = Field(default=1024, ge=1, le=1_000_000, description="Most requests that wait.")
    max_queued_tokens: int = Field(
        default=131_072, ge=1, le=100_000_000, description="Most source tokens of waiting requests together."
    )
    kv_cache_blocks: int | None = Field(
        default=None,
        ge=1,
        le=100_000_000,
        description="Cache blocks of 16 tokens; unset is enough for max_num_seqs longest ones.",
    )
    workspace_limit_bytes: int | None = Field(
        default=None, ge=1, le=2**50, description="Most bytes ONNX Runtime may hold beside weights; unset is no limit."
    )
    max_stream_messages_per_s: int = Field(
        default=500,
        ge=1,
        le=1_000_000,
        description="Most messages a second of all streams together; with more tokens than that, each brings several.",
    )
    max_message_bytes: int = Field(default=1_048_576, ge=1024, le=1_073_741_824, description="Largest request message.")
    max_concurrent_streams: int = Field(
        default=1024, ge=1, le=100_000, description="Most RPCs in flight on one connection."
    )
    keepalive_time_s: float = Field(
        default=60.0, ge=1, le=86_400, description="Silence after which the server pings a client."
    )
    keepalive_timeout_s: float = Field(
        default=20.0, ge=0.1, le=3600, description="Time a client has to answer a ping before its connection closes."
    )
    drain_grace_s: float = Field(
        default=30.0, ge=0, le=3600, description="Time that running requests have to finish after SIGTERM."
    )
    log_level: LogLevel = Field(default="info", description="Least severe messages to log.")


def fields() -> Mapping[str, FieldInfo]:
    """Every field of ServerConfig, in order of declaration."""
    return ServerConfig.model_fields


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
        group.add_argument(f"--{_kebab(name)}", dest=name, metavar=_metavar(schema), help=_help(field, schema))


def load_config(arguments: argparse.Namespace, environment: Mapping[str, str] | None = None) -> ServerConfig:
    """Combine flags, environment and TOML file. Raises ConfigError on the first field that is wrong.

    environment is consulted for the TOML file's name only; pydantic reads os.environ itself.
    """
    flags = _flags(arguments)
    environment = os.environ if environment is None else environment
    config_file = arguments.config or environment.get(CONFIG_VARIABLE) or None
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
    except ValidationError as error:
        raise ConfigError(_explain(error, flags, config_file)) from None
    if config.port == config.metrics_port != 0 and config.host == config.metrics_host:
        raise ConfigError(f"metrics_port is {config.metrics_port}; it must differ from port, on the same address")
    return config


def to_toml(config: ServerConfig) -> str:
    """The configuration as TOML that --config reads back; unset fields become comments."""
    lines = []
    for name in fields():
        value = getattr(config, name)
        if value is None:
            lines.append(f"# {name} is unset")
        elif isinstance(value, int | float):
            lines.append(f"{name} = {value}")
        else:
            lines.append(f"{name} = {json.dumps(str(value), ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in fields() if getattr(arguments, name) is not None}
    if arguments.bundle_path is not None:
        if "bundle" in given:
            raise ConfigError(f"bundle is given twice: {arguments.bundle_path} and --bundle {given['bundle']}")
        given["bundle"] = arguments.bundle_path
    return given


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
    name = str(first["loc"][0])
    variable = f"{ENV_PREFIX}{name.upper()}"
    if name in flags:
        origin = f"--{_kebab(name)}"
    elif os.environ.get(variable):
        origin = variable
    else:
        origin = str(config_file)
    if name not in fields():
        return f"{name} (from {origin}) is not a setting; the settings are {', '.join(fields())}"
    return f"{name} (from {origin}) is {first['input']!r}; it must be {_allowed(_schemas()[name])}"


def _schemas() -> dict[str, dict[str, Any]]:
    """JSON schema of each field; of an optional field, the schema of its value."""
    properties: dict[str, dict[str, Any]] = ServerConfig.model_json_schema()["properties"]
    return {name: schema.get("anyOf", [schema])[0] for name, schema in properties.items()}


def _allowed(schema: Mapping[str, Any]) -> str:
    """What a field takes, in words."""
    if choices := schema.get("enum"):
        return f"one of {', '.join(choices)}"
    if schema["type"] == "string":
        return "a text that is not empty"
    kind = "a whole number" if schema["type"] == "integer" else "a number"
    return f"{kind} from {schema['minimum']} to {schema['maximum']}"


def _help(field: FieldInfo, schema: Mapping[str, Any]) -> str:
    text = (field.description or "").rstrip(".").replace("%", "%%")
    text = text[0].lower() + text[1:]
    if choices := schema.get("enum"):
        text += f": {', '.join(choices)}"
    if field.default_factory is not None or field.default in (None, SHIPPED_BUNDLE):
        return text
    return f"{text} (default: {field.default})"


def _metavar(schema: Mapping[str, Any]) -> str:
    if schema.get("format") == "path":
        return "DIR"
    return "TEXT" if schema["type"] == "string" else "N"


def _kebab(name: str) -> str:
    return name.replace("_", "-")
