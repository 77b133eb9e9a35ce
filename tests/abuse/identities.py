"""Files of a server under mutual TLS, and certificates of those it lets in and of those it must not."""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path

from antiphon.client import Connection
from tests.certificates import Authority, Pair

SERVER, HONEST, ATTACKER = "server", "honest", "attacker"
STRANGERS = {
    "no certificate": None,
    "expired certificate": "expired",
    "certificate of another authority": "other",
}
"""Those whom the server must not let in, and the names of their files."""


@dataclass(frozen=True, slots=True)
class Identities:
    """Certificates that lie in a folder, for whichever process needs one."""

    folder: Path

    @property
    def flags(self) -> list[str]:
        """Of a server that asks its clients for certificates."""
        pair = self._pair(SERVER)
        return [f"--tls-cert={pair.cert}", f"--tls-key={pair.key}", f"--tls-client-ca={self.folder / 'ca.pem'}"]

    @property
    def honest(self) -> Connection:
        """Of a client with a certificate of its own."""
        pair = self._pair(HONEST)
        return Connection(
            tls_ca=self.folder / "ca.pem", tls_cert=pair.cert, tls_key=pair.key, tls_server_name="localhost"
        )

    @property
    def attacker(self) -> ssl.SSLContext:
        """Of an attacker whom the server lets in."""
        return self._context(ATTACKER)

    @property
    def strangers(self) -> dict[str, ssl.SSLContext]:
        """Of those whom the server must not let in."""
        return {about: self._context(name) for about, name in STRANGERS.items()}

    def _pair(self, name: str) -> Pair:
        return Pair(cert=self.folder / f"{name}.pem", key=self.folder / f"{name}.key")

    def _context(self, name: str | None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.folder / "ca.pem")
        context.set_alpn_protocols(["h2"])
        if name is not None:
            pair = self._pair(name)
            context.load_cert_chain(pair.cert, pair.key)
        return context


class Issuer:
    """Makes the files of a folder, and the server's again as often as it is asked to."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = Authority(folder)
        self.identities = Identities(folder)
        self.renew()
        yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        self._place(self._authority.client(HONEST), HONEST)
        self._place(self._authority.client(ATTACKER), ATTACKER)
        self._place(self._authority.client("late", not_after=yesterday), "expired")
        self._place(Authority(folder, "other-ca").client(HONEST), "other")

    def renew(self) -> None:
        """Put a new certificate and key in the place of the server's, each file at once, the key first."""
        self._place(self._authority.server(), SERVER)

    def _place(self, pair: Pair, name: str) -> None:
        pair.key.replace(self._folder / f"{name}.key")
        pair.cert.replace(self._folder / f"{name}.pem")
