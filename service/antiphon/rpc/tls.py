"""Reads the certificates of the server's ports, and checks them before they are used.

A handshake of the pair with itself in memory finds a wrong key, an expired certificate and the expiry date with the
standard library alone.
"""

from __future__ import annotations

import contextlib
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc

from antiphon.rpc.reloading import FileProblem, read_bytes

_MAX_FILE_BYTES = 1 << 20
# Upper bound on round trips of a TLS 1.2 or 1.3 handshake.
_MAX_FLIGHTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """PEM files: certificate chain, its key, and the authorities of clients; None requires no client certificate."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of all files."""
        return tuple(path for path in (self.cert, self.key, self.client_ca) if path is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificates:
    """Checked pair for gRPC and for HTTPS. leaf: the certificate itself in DER. expires_s: its expiry in Unix time."""

    grpc: grpc.ServerCertificateConfiguration
    https: ssl.SSLContext
    leaf: bytes
    expires_s: float


def read_certificates(files: TlsFiles) -> Certificates:
    """Read and check the files. Raises FileProblem that names the faulty one."""
    cert = read_bytes("tls_cert", files.cert, _MAX_FILE_BYTES)
    key = read_bytes("tls_key", files.key, _MAX_FILE_BYTES)
    clients = None if files.client_ca is None else read_bytes("tls_client_ca", files.client_ca, _MAX_FILE_BYTES)
    client_context = _client_context(files, cert)
    context = _server_context(files)
    leaf, expires_s = _prove(files, context, client_context)
    if clients is not None:
        _load_authorities(context, "tls_client_ca", files.client_ca, clients)
        context.verify_mode = ssl.CERT_REQUIRED
    return Certificates(
        grpc=grpc.ssl_server_certificate_configuration([(key, cert)], clients),
        https=context,
        leaf=leaf,
        expires_s=expires_s,
    )


def _client_context(files: TlsFiles, cert: bytes) -> ssl.SSLContext:
    """Return a client's context that trusts exactly this certificate, from any issuer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _load_authorities(context, "tls_cert", files.cert, cert)
    return context


def _load_authorities(context: ssl.SSLContext, setting: str, path: Path | None, content: bytes) -> None:
    try:
        context.load_verify_locations(cadata=content.decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise FileProblem(f"{setting} is {path}, which holds no certificate in PEM") from None


def _server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a server's context of the pair."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2

    def refuse() -> NoReturn:  # without it OpenSSL would ask on the terminal
        raise FileProblem(f"tls_key is {files.key}, which is encrypted; a server needs it unencrypted")

    try:
        context.load_cert_chain(files.cert, files.key, password=refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise FileProblem(f"tls_key is {files.key}, which is not the key of tls_cert, {files.cert}") from None
        raise FileProblem(f"tls_key is {files.key}, which holds no private key in PEM") from None
    except OSError as error:  # removed after it was read
        raise FileProblem(f"tls_key is {files.key}, which cannot be read: {error.strerror}") from None
    return context


def _prove(files: TlsFiles, server_context: ssl.SSLContext, client_context: ssl.SSLContext) -> tuple[bytes, float]:
    """Do a handshake of the pair with itself. Return the leaf, and its expiry in Unix time. Raises FileProblem."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_side=False)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for _ in range(_MAX_FLIGHTS):
            for side in (client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise FileProblem(f"tls_cert is {files.cert}, which no client would accept: {error.verify_message}") from None
    except ssl.SSLError as error:
        raise FileProblem(f"tls_cert is {files.cert}, which cannot be used: {error.reason}") from None
    leaf, fields = client.getpeercert(binary_form=True), client.getpeercert()
    assert leaf is not None
    assert fields is not None
    return leaf, float(ssl.cert_time_to_seconds(str(fields["notAfter"])))
