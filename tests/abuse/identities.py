"""Files of a server with mutual TLS, and client certificates that it must accept or refuse."""

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path

from antiphon.client import Connection
from tests.certificates import Authority, Pair

SERVER, HONEST, ATTACKER = "server", "honest", "attacker"
STRANGERS = {"no certificate": None, "expired certificate": "expired", "certificate of another authority": "other"}
"""Those whom the server must not let in, and the names of their files."""


@dataclass(frozen=True, slots=True)
class Identities:
    """Certificates in a folder, which any process can read."""

    folder: Path

    @property
    def flags(self) -> list[str]:
        """Return the flags of a server that requires client certificates."""
        pair = self._pair(SERVER)
        return [f"--tls-cert={pair.cert}", f"--tls-key={pair.key}", f"--tls-client-ca={self.folder / 'ca.pem'}"]

    @property
    def honest(self) -> Connection:
        """Return the connection of a client with its own certificate."""
        pair = self._pair(HONEST)
        return Connection(
            tls_ca=self.folder / "ca.pem", tls_cert=pair.cert, tls_key=pair.key, tls_server_name="localhost"
        )

    @property
    def attacker(self) -> ssl.SSLContext:
        """Return the TLS context of an attacker with a valid certificate."""
        return self._context(ATTACKER)

    @property
    def strangers(self) -> dict[str, ssl.SSLContext]:
        """Return the TLS contexts that the server must refuse, by name."""
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
    """Writes the files of a folder, and renews the server's pair on request."""

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
        """Replace certificate and key of the server, each file atomically, the key first."""
        self._place(self._authority.server(), SERVER)

    def _place(self, pair: Pair, name: str) -> None:
        pair.key.replace(self._folder / f"{name}.key")
        pair.cert.replace(self._folder / f"{name}.pem")
