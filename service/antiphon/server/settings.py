"""Settings of a server, from flags, environment variables and a TOML file. Errors name the wrong setting.

Flags take precedence over `ANTIPHON_*` variables, those over the TOML file, and that over the defaults. Knows the
allowed values, not their use; loads no model.
"""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

import antiphon.bundle
from antiphon.domain.limits import ALLOWED, EngineLimits
from antiphon.rpc.access_settings import AccessSettings, Port, contradiction
from antiphon.runtime.cuda.open_device import DeviceChoice
from antiphon.server.models.model_settings import (
    Lanes,
    ModelName,
    ModelPlan,
    ModelSettings,
    PrecisionChoice,
    Threads,
    read_model_flags,
    server_limit,
)

ENV_PREFIX = "ANTIPHON_"
CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"
MAX_GRACE_S = 3600
SHIPPED_BUNDLE = Path(antiphon.bundle.__file__).parents[1] / "bundles" / "en-de"

LogLevel = Literal["debug", "info", "warning", "error"]
Workers = Annotated[int, Field(ge=1, le=256)] | Literal["auto"]
LogFormat = Literal["text", "json"]
ENDPOINT_PATTERN = r"^https?://[^/\s]+/?$"
AccessLog = Literal["all", "errors", "none"]


class ConfigError(Exception):
    """A setting cannot be used. The message names the field, its value, its origin and the allowed values."""


def usable_cores() -> int:
    """Return the number of cores for this process, from its affinity and the container's CPU quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(affinity, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        return affinity


class ServerConfig(AccessSettings):
    """Settings of one server process. Frozen; names carry their units."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    bundle: Path = Field(default=SHIPPED_BUNDLE, description="Directory of the exported model to serve.")
    models: dict[ModelName, ModelSettings] = Field(
        default_factory=dict,
        description="Name and bundle of a model, NAME=PATH; repeat it for each model. The first one is the default.",
    )
    precision: PrecisionChoice | None = Field(
        default=None, description="Precision of the graphs to run; unset: int8 if the bundle has it, bfloat16 on a GPU."
    )
    device: DeviceChoice = Field(
        default="cpu",
        description="Device that runs the graphs; auto: an NVIDIA GPU if it is usable and the bundle has cuda graphs.",
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="Address that gRPC listens on.")
    port: Port = Field(default=50051, description="Port that gRPC listens on; 0: any free port.")
    metrics_host: str = Field(default="127.0.0.1", min_length=1, description="Address that /metrics listens on.")
    metrics_port: Port = Field(default=9090, description="Port that /metrics listens on; 0: any free port.")
    admin_host: str = Field(default="127.0.0.1", min_length=1, description="Address that the admin service listens on.")
    admin_port: Port | None = Field(
        default=None, description="Port of the admin service, which loads and unloads models; 0: any free port."
    )
    memory_limit_bytes: Annotated[int, Field(ge=1, le=2**50)] | None = Field(
        default=None, description="Maximum bytes of all models together: weights, caches, workspaces."
    )
    threads: Threads = Field(
        default_factory=usable_cores, description="Threads that compute one step; unset: every core."
    )
    lanes: Lanes = Field(
        default=1,
        description="Lanes that compute steps side by side, each with its part of threads; auto: the fastest number.",
    )
    workers: Workers = Field(
        default=1,
        description="Processes that share the gRPC port and divide the cores; auto: by cores and size of the models.",
    )
    max_num_seqs: int = server_limit("max_num_seqs")
    max_num_batched_tokens: int = server_limit("max_num_batched_tokens")
    max_queued_requests: int = server_limit("max_queued_requests")
    max_queued_tokens: int = server_limit("max_queued_tokens")
    max_queue_time_s: float = server_limit("max_queue_time_s")
    kv_cache_blocks: int | None = server_limit("kv_cache_blocks")
    workspace_limit_bytes: int | None = server_limit("workspace_limit_bytes")
    max_stream_messages_per_s: int = Field(
        default=500,
        ge=1,
        le=1_000_000,
        description="Maximum messages per second of all streams; if there are more tokens, a message has several.",
    )
    slow_reader_timeout_s: float = Field(
        default=30.0,
        ge=0.1,
        le=86_400,
        description="Maximum time until the client reads an answer, or a message of a stream.",
    )
    drain_delay_s: float = Field(
        default=0.0,
        ge=0,
        le=MAX_GRACE_S,
        description="Time after SIGTERM in which new requests are still served, until load balancers stop sending.",
    )
    drain_grace_s: float = Field(
        default=30.0,
        ge=0,
        le=MAX_GRACE_S,
        description="Maximum time for running requests to finish after SIGTERM and the drain delay.",
    )
    watchdog_timeout_s: float = Field(
        default=60.0,
        ge=0.1,
        le=MAX_GRACE_S,
        description="Maximum time of an engine's step; if it is exceeded, liveness fails.",
    )
    load_reports: Literal["on", "off"] = Field(
        default="on",
        description="Load reports in a trailer of every RPC, and by a separate service.",
    )
    load_report_interval_s: float = Field(
        default=1.0, ge=0.1, le=3600, description="Shortest interval between the reports of a load report stream."
    )
    log_level: LogLevel = Field(default="info", description="Least severe messages to log.")
    log_format: LogFormat = Field(default="text", description="Format of log lines; json is one object per line.")
    access_log: AccessLog = Field(default="all", description="Finished RPCs to log, at level info.")
    otlp_endpoint: Annotated[str, Field(pattern=ENDPOINT_PATTERN)] | None = Field(
        default=None, description="Collector of OpenTelemetry spans, http://HOST:PORT; unset: no spans."
    )
    trace_sample_ratio: float = Field(
        default=1.0, ge=0, le=1, description="Share of the calls without a trace that start a trace."
    )

    @property
    def limits(self) -> EngineLimits:
        """Limits of every model that sets none of its own."""
        return EngineLimits(**{name: getattr(self, name) for name in ALLOWED})

    @property
    def plans(self) -> tuple[ModelPlan, ...]:
        """Plans of the models to load, the default first: `models`, or `bundle` under its own name."""
        if not self.models:
            return (self.plan(None, ModelSettings(path=self.bundle)),)
        return tuple(self.plan(name, settings) for name, settings in self.models.items())

    def plan(self, name: str | None, settings: ModelSettings) -> ModelPlan:
        """Return the plan to load a model: its own settings, else the server's. name: None takes the bundle's name."""
        return ModelPlan(
            name=name,
            path=settings.path,
            precision=self.precision if settings.precision is None else settings.precision,
            threads=self.threads if settings.threads is None else settings.threads,
            lanes=self.lanes if settings.lanes is None else settings.lanes,
            limits=replace(self.limits, **settings.own_limits),
            max_message_bytes=self.max_message_bytes,
            max_text_bytes=self.max_text_bytes,
        )


def fields() -> Mapping[str, FieldInfo]:
    """Return the fields of ServerConfig in order of declaration, those of its ports last."""
    inherited = AccessSettings.model_fields
    own = {name: field for name, field in ServerConfig.model_fields.items() if name not in inherited}
    return {**own, **inherited}


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


def load_config(arguments: argparse.Namespace, environment: Mapping[str, str] | None = None) -> ServerConfig:
    """Combine flags, environment and TOML file. Raises ConfigError on the first field that is wrong.

    environment: read only for the TOML file's name; pydantic reads os.environ itself.
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
    except SettingsError as error:  # only `models` is parsed as JSON
        raise ConfigError(f"models (from {ENV_PREFIX}MODELS) is not JSON: {error.__cause__}") from None
    except ValidationError as error:
        raise ConfigError(_explain(error, flags, config_file)) from None
    _check_ports(config)
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
    taken = {(config.host, config.port): "port"}
    for field in ("metrics", "admin", "probe"):
        host, port = getattr(config, f"{field}_host"), getattr(config, f"{field}_port")
        if port and (other := taken.setdefault((host, port), f"{field}_port")) != f"{field}_port":
            raise ConfigError(f"{field}_port is {port}; it must differ from {other}, on the same address")


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
    shown = value if isinstance(value, int | float) else json.dumps(str(value), ensure_ascii=False)
    return f"{name} = {shown}"


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in fields() if getattr(arguments, name) is not None}
    if arguments.bundle_path is not None:
        if "bundle" in given:
            raise ConfigError(f"bundle is given twice: {arguments.bundle_path} and --bundle {given['bundle']}")
        given["bundle"] = arguments.bundle_path
    if "models" in given:
        try:
            given["models"] = read_model_flags(given["models"])
        except ValueError as error:
            raise ConfigError(str(error)) from None
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
    field, known = rest[0] if rest else "", ModelSettings.model_fields
    if field == "[key]":
        return (
            f"models (from {origin}) names {name!r}; a name is 1 to 64 letters, digits, dots, underscores and hyphens"
        )
    where = ".".join(["models", name, *rest[:1]])  # beyond the field there are only names of its possible types
    if kind == "missing":
        return f"{where} (from {origin}) is missing; it must be the directory of a bundle"
    if field not in known:
        expected = "a table with a path" if not field else f"one of {', '.join(known)}"
        return f"{where} (from {origin}) is not a setting of a model; it must be {expected}"
    return f"{where} (from {origin}) is {value!r}; it must be {allowed_of_model(field)}"


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
