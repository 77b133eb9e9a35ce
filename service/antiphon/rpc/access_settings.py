"""Settings of a server's ports: authentication, TLS, and limits on connections and calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, WithJsonSchema
from pydantic_settings import BaseSettings

File = Annotated[Path, WithJsonSchema({"type": "string", "format": "file"})]
Seconds = Annotated[float, Field(ge=1, le=31_536_000)]
Port = Annotated[int, Field(ge=0, le=65535)]
# Metadata keys that HTTP/2 allows.
MetadataKey = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}[a-z0-9]$")]


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
