"""Settings of a server and of its models: fields, defaults and allowed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

import antiphon.bundle
from antiphon.bundle.manifest import NAME_PATTERN
from antiphon.domain.limits import ALLOWED, DEFAULT_LIMITS, EngineLimits
from antiphon.runtime.cuda.open_device import DeviceChoice
from antiphon.server.machine import usable_cores

ENV_PREFIX = "ANTIPHON_"
MAX_GRACE_S = 3600
SHIPPED_BUNDLE = Path(antiphon.bundle.__file__).parents[1] / "bundles" / "en-de"

File = Annotated[Path, WithJsonSchema({"type": "string", "format": "file"})]
Seconds = Annotated[float, Field(ge=1, le=31_536_000)]
Port = Annotated[int, Field(ge=0, le=65535)]
# Metadata keys that HTTP/2 allows.
MetadataKey = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}[a-z0-9]$")]
PrecisionChoice = Literal["float32", "int8", "int4", "bfloat16", "float16"]
Threads = Annotated[int, Field(ge=1, le=1024)]
Lanes = Annotated[int, Field(ge=1, le=64)] | Literal["auto"]
ModelName = Annotated[str, Field(pattern=NAME_PATTERN)]
LogLevel = Literal["debug", "info", "warning", "error"]
Workers = Annotated[int, Field(ge=1, le=256)] | Literal["auto"]
LogFormat = Literal["text", "json"]
ENDPOINT_PATTERN = r"^https?://[^/\s]+/?$"
AccessLog = Literal["all", "errors", "none"]


class ConfigError(Exception):
    """A setting cannot be used. The message names the field, its value, its origin and the allowed values."""


def server_limit(name: str) -> Any:
    """Return the field of a limit in the server's settings, with the limit's default, allowed values and meaning."""
    return _limit(name, getattr(DEFAULT_LIMITS, name))


def model_limit(name: str) -> Any:
    """Return the field of a limit in a model's own settings; None takes the server's."""
    return _limit(name, None)


def _limit(name: str, default: float | None) -> Any:
    allowed = ALLOWED[name]
    return Field(default=default, ge=allowed.low, le=allowed.high, description=allowed.meaning)


class ModelSettings(BaseModel):
    """Settings of one model: the directory of its bundle and its own limits. A plain text is the directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    precision: PrecisionChoice | None = None
    threads: Threads | None = None
    lanes: Lanes | None = None
    max_num_seqs: int | None = model_limit("max_num_seqs")
    max_num_batched_tokens: int | None = model_limit("max_num_batched_tokens")
    max_queued_requests: int | None = model_limit("max_queued_requests")
    max_queued_tokens: int | None = model_limit("max_queued_tokens")
    max_queue_time_s: float | None = model_limit("max_queue_time_s")
    kv_cache_blocks: int | None = model_limit("kv_cache_blocks")
    workspace_limit_bytes: int | None = model_limit("workspace_limit_bytes")

    @property
    def own_limits(self) -> Mapping[str, Any]:
        """Limits that this model has set itself, by name."""
        limits = {name: getattr(self, name) for name in ALLOWED}
        return {name: value for name, value in limits.items() if value is not None}

    @model_validator(mode="before")
    @classmethod
    def _plain_text_as_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlan:
    """Everything needed to load one model."""

    name: str | None
    """None takes the bundle's name."""
    path: Path
    precision: PrecisionChoice | None
    threads: int
    lanes: int | Literal["auto"]
    """A number, or "auto" for the fastest one in a short measurement."""
    limits: EngineLimits
    max_message_bytes: int
    max_text_bytes: int


class AccessSettings(BaseSettings):
    """Settings of the ports, part of ServerConfig."""

    probe_host: str = Field(default="127.0.0.1", min_length=1, description="Address that the probe port listens on.")
    probe_port: Port | None = Field(
        default=None,
        description="Plaintext port for health only, for Kubernetes probes without TLS; 0: any free port.",
    )
    tls_cert: File | None = Field(
        default=None, description="File (PEM) of the certificate chain of the gRPC ports; if set, they use TLS."
    )
    tls_key: File | None = Field(default=None, description="File (PEM) of its private key.")
    tls_client_ca: File | None = Field(
        default=None,
        description="File (PEM) of authorities; if set, clients must present a certificate of one of them.",
    )
    metrics_tls: bool = Field(default=False, description="Serve /metrics as https, with the same certificate.")
    auth_tokens_file: File | None = Field(
        default=None, description="File of NAME:SHA256 lines; if set, calls need one of these bearer tokens."
    )
    admin_tokens_file: File | None = Field(default=None, description="Like auth_tokens_file, for the admin port.")
    caller_metadata_key: MetadataKey | None = Field(
        default=None, description="Metadata key in which a trusted proxy sends the client's name, for its fair share."
    )
    max_message_bytes: int = Field(default=1_048_576, ge=1024, le=1_073_741_824, description="Largest request message.")
    max_text_bytes: int = Field(
        default=65_536,
        ge=1024,
        le=1_073_741_824,
        description="Largest text of a request in bytes of UTF-8, and maximum ids of Detokenize.",
    )
    max_response_bytes: Annotated[int, Field(ge=1024, le=2_147_483_647)] | None = Field(
        default=None, description="Largest response message; unset: no limit."
    )
    max_metadata_bytes: int = Field(
        default=16_384, ge=1024, le=1_048_576, description="Maximum metadata of one call, as HTTP/2 counts it."
    )
    max_concurrent_rpcs: int = Field(
        default=4096, ge=1, le=1_000_000, description="Maximum RPCs in flight on all connections, without health."
    )
    request_timeout_s: float = Field(
        default=20.0, ge=0.1, le=86_400, description="Time from the headers of a call until its request is complete."
    )
    max_unsent_bytes: int = Field(
        default=67_108_864,
        ge=65_536,
        le=2**40,
        description="Maximum memory of unread answers, half of it for one client; beyond it, its oldest calls end.",
    )
    max_concurrent_streams: int = Field(
        default=1024, ge=1, le=100_000, description="Maximum RPCs in flight on one connection."
    )
    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        default=None,
        description="Maximum connections to the gRPC port; unset: as many as the limit of open files allows.",
    )
    max_connection_age_s: Seconds | None = Field(
        default=None,
        description="Age at which the server ends a connection gracefully, so that clients find new replicas.",
    )
    max_connection_age_grace_s: Seconds | None = Field(
        default=None, description="Maximum time for its running calls after that; unset: no limit."
    )
    max_connection_idle_s: Seconds | None = Field(
        default=None, description="Time without a call after which a connection is closed; unset: never."
    )
    keepalive_time_s: float = Field(
        default=60.0, ge=1, le=86_400, description="Time without data after which the server sends a ping to a client."
    )
    keepalive_timeout_s: float = Field(
        default=20.0,
        ge=0.1,
        le=3600,
        description="Maximum time for the answer to a ping before the connection is closed.",
    )


def contradiction(settings: AccessSettings, *, has_admin: bool) -> str | None:
    """Return a message about settings that contradict each other; None if there are none."""
    if (settings.tls_cert is None) != (settings.tls_key is None):
        present, missing = ("tls_cert", "tls_key") if settings.tls_key is None else ("tls_key", "tls_cert")
        return f"{present} is {getattr(settings, present)} and {missing} is unset; TLS needs both"
    for name in ("tls_client_ca", "metrics_tls"):
        if getattr(settings, name) and settings.tls_cert is None:
            return f"{name} is {getattr(settings, name)} and tls_cert is unset; it needs tls_cert and tls_key"
    if settings.max_connection_age_grace_s is not None and settings.max_connection_age_s is None:
        return "max_connection_age_grace_s is set and max_connection_age_s is not; it needs an age"
    if has_admin and settings.auth_tokens_file is not None and settings.admin_tokens_file is None:
        return "auth_tokens_file and admin_port are set and admin_tokens_file is not; the admin port needs its own"
    return None


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
    fronts: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Processes that answer calls in front of one process of the engines; 0: one process does both.",
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
