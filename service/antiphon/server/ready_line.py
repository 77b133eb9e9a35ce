"""Line that a server prints once it is ready, with a first command to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from antiphon.client import DEFAULT_TARGET
from antiphon.server.listener import address_of
from antiphon.server.settings import ServerConfig
from antiphon.v1 import inference_pb2 as pb


class ReadyModel(Protocol):
    """Model that is served."""

    @property
    def name(self) -> str:
        """Name under which it is served."""
        ...

    @property
    def precision(self) -> str:
        """Precision of its graphs."""
        ...

    @property
    def description(self) -> pb.Model:
        """Description that clients receive."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Ports:
    """Ports that a server listens on; None for a port that is not configured."""

    port: int
    metrics: int
    admin: int | None
    probe: int | None


def ready_line(config: ServerConfig, served: Sequence[ReadyModel], ports: Ports) -> str:
    """Return the line. served: every model, the default first."""
    address = address_of(config.host, ports.port)
    scheme = "https" if config.metrics_tls else "http"
    admin = "" if ports.admin is None else f", admin on {address_of(config.admin_host, ports.admin)}"
    probe = "" if ports.probe is None else f", probes on {address_of(config.probe_host, ports.probe)}"
    return (
        f"antiphon: ready: {', '.join(f'{one.name} ({one.precision})' for one in served)} on {address}, "
        f"metrics on {scheme}://{address_of(config.metrics_host, ports.metrics)}/metrics{admin}{probe}; "
        f"next: antiphon {first_command(served[0].description, _client_flags(config, address))}"
    )


def _client_flags(config: ServerConfig, address: str) -> str:
    """Return the flags that a client needs for access, with placeholders for files."""
    flags = {
        f"--target {address} ": address != DEFAULT_TARGET,
        "--tls-ca CA ": config.tls_cert is not None,
        "--tls-cert CERT --tls-key KEY ": config.tls_client_ca is not None,
        "--token-file TOKEN ": config.auth_tokens_file is not None,
    }
    return "".join(flag for flag, is_needed in flags.items() if is_needed)


def first_command(model: pb.Model, target: str) -> str:
    """Return a first command for the user to try, which the default model supports."""
    text = "How are you?"
    if model.architecture != pb.ARCHITECTURE_ENCODER:
        return f'generate {target}"{text}"'
    tasks = {description.task for description in model.tasks}
    if pb.TASK_CLASSIFY in tasks:
        return f'classify {target}"{text}"'
    if pb.TASK_TAG in tasks:
        return f'tag {target}"{text}"'
    if pb.TASK_FILL_MASK in tasks and model.mask_token:
        return f'fill-mask {target}"How are {model.mask_token}?"'
    return f"models list {target}".rstrip()
