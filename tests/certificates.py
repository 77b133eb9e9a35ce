"""New certificates as files: authorities, servers, clients, and pairs with one error."""

from __future__ import annotations

import contextlib
import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trustme
from cryptography.hazmat.primitives import serialization

from antiphon.client import Connection

_END = "\n-----END CERTIFICATE-----\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Certificate chain and its key, as PEM files."""

    cert: Path
    key: Path


class Authority:
    """Issues pairs into a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self.file = folder / f"{name}.pem"
        self._authority.cert_pem.write_to_path(str(self.file))
        self._num_issued = 0

    def server(self, **given: Any) -> Pair:
        """Issue a pair for this machine."""
        return self._issue("127.0.0.1", "localhost", **given)

    def expired_server(self) -> Pair:
        """Issue a pair for this machine that expired yesterday."""
        return self.server(not_after=datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1))

    def client(self, *names: str, **given: Any) -> Pair:
        """Issue a pair for a client with these names."""
        return self._issue(*names, **given)

    def _issue(self, *names: str, **given: Any) -> Pair:
        issued = self._authority.issue_cert(*names, **given)
        self._num_issued += 1
        pair = Pair(
            cert=self._folder / f"{self.file.stem}-{self._num_issued}.pem",
            key=self._folder / f"{self.file.stem}-{self._num_issued}.key",
        )
        pair.cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
        pair.key.write_bytes(issued.private_key_pem.bytes())
        pair.key.chmod(0o600)
        return pair


def encrypt(key: Path) -> None:
    """Encrypt a key with a passphrase, in place."""
    plain = serialization.load_pem_private_key(key.read_bytes(), password=None)
    key.write_bytes(
        plain.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )


def trusting(authority: Authority, pair: Pair | None = None, **given: Any) -> Connection:
    """Return a client's connection that trusts an authority and presents a pair."""
    cert, key = (None, None) if pair is None else (pair.cert, pair.key)
    return Connection(tls_ca=authority.file, tls_cert=cert, tls_key=key, **given)


def replace(path: Path, content: bytes) -> None:
    """Replace a file atomically by another one, as orchestrators do."""
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(content)
    fresh.replace(path)


def renew(shown: Pair, by: Pair) -> None:
    """Replace the pair of a server; the key first, so that for a moment key and certificate do not match."""
    replace(shown.key, by.key.read_bytes())
    replace(shown.cert, by.cert.read_bytes())


def as_pem(pair: Pair) -> str:
    """Return the leaf certificate in the format of ssl.get_server_certificate."""
    leaf = pair.cert.read_text().partition(_END)[0] + _END
    return ssl.DER_cert_to_PEM_cert(ssl.PEM_cert_to_DER_cert(leaf))


def client_hello() -> bytes:
    """Return the first message of a handshake."""
    context, sent = ssl.create_default_context(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost").do_handshake()
    return sent.read()
