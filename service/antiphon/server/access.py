"""Access control of a server's ports, from its settings: certificates, tokens, and warnings about open ports.

Raises FileProblem at start-up if a file cannot be used. Later problems are logged, and the old content stays in use.
"""

from __future__ import annotations

import ipaddress
import logging
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc.aio

from antiphon.observability.telemetry import Telemetry
from antiphon.rpc.auth import Gate, Token, read_tokens
from antiphon.rpc.client_waits import ClientWaits
from antiphon.rpc.grpc_fixes.port_certificates import PortCertificates
from antiphon.rpc.reloading import FileMetrics, Reloading, is_readable_by_others
from antiphon.rpc.tls import Certificates, TlsFiles, read_certificates
from antiphon.server.settings import ServerConfig

log = logging.getLogger(__name__)

Tokens = Reloading[tuple[Token, ...]]


class Access:
    """Certificates and tokens of one server's ports."""

    def __init__(self, config: ServerConfig, metrics: FileMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self.certificates = self._open_certificates()
        self._tokens = self._open_tokens("auth_tokens_file", config.auth_tokens_file)
        self._admin_tokens = self._open_tokens("admin_tokens_file", config.admin_tokens_file)

    def port_certificates(self, *, is_shared: bool = False) -> PortCertificates | None:
        """Return the certificates of a further gRPC port; None serves plaintext.

        is_shared: other processes listen on the port too.
        """
        if self.certificates is None:
            return None
        return PortCertificates(
            self.certificates,
            needs_client=self._config.tls_client_ca is not None,
            is_shared=is_shared,
            on_failure=lambda: self._metrics.count_tls("failed"),
        )

    @property
    def metrics_context(self) -> Callable[[], ssl.SSLContext] | None:
        """Function that returns the TLS context of a new HTTPS connection; None serves metrics over plain HTTP."""
        certificates = self.certificates
        if certificates is None or not self._config.metrics_tls:
            return None
        return lambda: certificates.current().https

    def interceptors(self, telemetry: Telemetry, waits: ClientWaits) -> Sequence[grpc.aio.ServerInterceptor]:
        """Return the interceptors of the gRPC port."""
        if self._tokens is None and self._config.caller_metadata_key is None:
            return ()
        return (Gate(telemetry, waits, tokens=self._tokens, caller_key=self._config.caller_metadata_key),)

    def admin_interceptors(self, telemetry: Telemetry, waits: ClientWaits) -> Sequence[grpc.aio.ServerInterceptor]:
        """Return the interceptors of the admin port."""
        return () if self._admin_tokens is None else (Gate(telemetry, waits, tokens=self._admin_tokens),)

    def warn(self) -> None:
        """Log warnings about settings that may be unintended."""
        for warning in warnings_of(self._config):
            log.warning("%s", warning)

    def _open_certificates(self) -> Reloading[Certificates] | None:
        cert, key = self._config.tls_cert, self._config.tls_key
        if cert is None or key is None:
            return None
        files = TlsFiles(cert=cert, key=key, client_ca=self._config.tls_client_ca)

        def read() -> Certificates:
            certificates = read_certificates(files)
            self._metrics.set_certificate_expiry(certificates.expires_s)
            return certificates

        return Reloading(files.paths, read, self._metrics.count_tls)

    def _open_tokens(self, setting: str, path: Path | None) -> Tokens | None:
        if path is None:
            return None
        return Reloading((path,), lambda: read_tokens(setting, path), self._metrics.count_tokens)


def warnings_of(config: ServerConfig) -> Iterator[str]:
    """Yield warnings about ports and files that are open to others."""
    ports = [("port", config.host, config.auth_tokens_file)]
    if config.admin_port is not None:
        ports.append(("admin_port", config.admin_host, config.admin_tokens_file))
    for setting, host, tokens in ports:
        if is_loopback(host):
            continue
        if tokens is None and config.tls_client_ca is None:
            yield f"{setting} listens on {host}, and every client that reaches it may call: set tokens or tls_client_ca"
        if tokens is not None and config.tls_cert is None:
            yield f"{setting} listens on {host} without TLS, so tokens can be read in transit: set tls_cert"
    if not is_loopback(config.metrics_host):
        yield f"metrics_port listens on {config.metrics_host}, and every client that reaches it may read the metrics"
    for setting in ("tls_key", "auth_tokens_file", "admin_tokens_file"):
        path: Path | None = getattr(config, setting)
        if path is not None and is_readable_by_others(path):
            yield f"{setting} is {path}, which every user of this machine may read: chmod o-r"


def is_loopback(host: str) -> bool:
    """Return whether a listening address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
