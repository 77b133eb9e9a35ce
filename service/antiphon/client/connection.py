"""Connection of a client to a server: encryption, credentials, retries, load balancing, processes.

    Connection(tls_ca="ca.pem", token_file="token", load_balancing="round_robin")

Imports grpcio only.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import grpc
import grpc.aio

DEFAULT_TARGET = "127.0.0.1:50051"
SERVICE_NAME = "antiphon.v1.InferenceService"

LoadBalancing = Literal["pick_first", "round_robin"]
Option = tuple[str, str | int]

MAX_CONNECTIONS = 256
"""Maximum number of connections of one client."""

MAX_FILE_BYTES = 1 << 24
"""Maximum size of a file of certificates, a key or a token."""

WORKER_KEY = "antiphon-worker"
"""Trailer with the index of the process that answered and the number of processes, such as 0/2."""

_LOAD_BALANCING = ("pick_first", "round_robin")
_LOOPBACK = ("127.", "localhost", "[::1]", "::1")
# Maximum of gRPC: it reduces a larger number, with a message for every channel (gRFC A6).
_MAX_ATTEMPTS = 5
# A call whose backoff rounds to nothing hangs until its deadline (grpc/grpc#41036; 28 of 60 calls at 1 ms, 1.85.1).
_MIN_BACKOFF_S = 0.01
# A server disconnects clients that ping more often.
_MIN_KEEPALIVE_S = 10
_KEEPALIVE_TIMEOUT_MS = 20_000
# gRPC itself answers CANCELLED to a call that reaches a server while it closes, before a handler has started. A call
# that its own client cancels has ended and is not retried.
_RETRYABLE = ("UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED")
# Channels to one target otherwise share a connection.
_OWN_CONNECTION: Option = ("grpc.use_local_subchannel_pool", 1)
# A request that is larger than the retry buffer is not retried. gRPC's default of 256 KiB would exclude requests that a
# server accepts (max_message_bytes, 1 MiB by default). The memory is used only while such a large request runs.
_RETRY_BUFFER_BYTES = 1 << 24
# Attempts for each connection: 16 of 2 processes leave one out in 1 of 65,000 cases, and take 20 ms on one machine.
_ATTEMPTS_PER_PROCESS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """Retries of calls that failed before the server answered. gRPC carries them out (gRFC A6).

    Retried are only UNAVAILABLE, RESOURCE_EXHAUSTED and a server's CANCELLED, and only before the response's headers.
    The deadline of a call includes all attempts. A server's pushback replaces the backoff; a pushback that forbids
    retries ends them.

    attempts: maximum number of attempts, the first included; 1 disables retries. backoff_s: wait before the second
    attempt. It doubles for each further attempt up to max_backoff_s, and is varied at random by 20 %. budget: tokens of
    one client. A failed attempt takes one token, and a successful call returns budget_ratio tokens. While at most half
    of the tokens are left, nothing is retried, so that clients do not multiply an overload. None: no budget.
    """

    attempts: int = _MAX_ATTEMPTS
    backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    budget: int | None = 100
    budget_ratio: float = 0.1

    def __post_init__(self) -> None:
        _check("attempts", self.attempts, 1, _MAX_ATTEMPTS)
        _check("backoff_s", self.backoff_s, _MIN_BACKOFF_S, 3600)
        _check("max_backoff_s", self.max_backoff_s, self.backoff_s, 3600)
        _check("budget_ratio", self.budget_ratio, 0.001, 1000)
        if self.budget is not None:
            _check("budget", self.budget, 1, 1000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """Settings of the connection to a server. A wrong field raises a ValueError that names it.

    tls: encrypt; any other tls_ field also enables encryption. tls_ca: PEM file of trusted authorities; None uses
    gRPC's list. tls_cert, tls_key: PEM files that identify the client, if the server requires them (mutual TLS).
    tls_server_name: the name in the server's certificate, if it differs from the target (addresses, port forwarding).

    token: bearer token, or a function that returns it and is called for every call. token_file: file with the token; it
    is read again when it changes. metadata: sent with every call, keys in lower case.

    load_balancing: "round_robin" spreads calls over all ready addresses of the target; a name (dns:///host:port) or a
    list (ipv4:10.0.0.1:50051,10.0.0.2:50051) can have several. "pick_first" uses one address.
    connections: number of connections, which take calls in turn. A server of several processes (--workers) answers all
    calls of a connection in one of them. None is one, and for `generate_many` one for each process.
    keepalive_s: a connection that has been silent for this time while calls wait is pinged. None: no pings.
    max_reconnect_s: maximum wait between attempts to reach a server that is away. None: gRPC's two minutes.
    """

    tls: bool = False
    tls_ca: str | os.PathLike[str] | None = None
    tls_cert: str | os.PathLike[str] | None = None
    tls_key: str | os.PathLike[str] | None = None
    tls_server_name: str | None = None
    token: str | Callable[[], str] | None = field(default=None, repr=False)
    token_file: str | os.PathLike[str] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    load_balancing: LoadBalancing = "pick_first"
    connections: int | None = None
    keepalive_s: float | None = 30.0
    max_reconnect_s: float | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            present, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise ValueError(f"{present} is given without {missing}; a certificate needs its key")
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file are both given; give one or the other")
        if self.connections is not None:
            _check("connections", self.connections, 1, MAX_CONNECTIONS)
        if self.load_balancing not in _LOAD_BALANCING:
            raise ValueError(
                f"load_balancing is {self.load_balancing!r}; it must be one of {', '.join(_LOAD_BALANCING)}"
            )
        if self.keepalive_s is not None:
            _check("keepalive_s", self.keepalive_s, _MIN_KEEPALIVE_S, 86_400)
        if self.max_reconnect_s is not None:  # the range of gRPC's own setting
            _check("max_reconnect_s", self.max_reconnect_s, 0.1, 86_400)

    @property
    def is_encrypted(self) -> bool:
        """Return whether TLS is used."""
        return self.tls or any((self.tls_ca, self.tls_cert, self.tls_server_name))

    @property
    def has_token(self) -> bool:
        """Return whether calls carry a bearer token."""
        return self.token is not None or self.token_file is not None

    @property
    def _is_authorized(self) -> bool:
        return self.has_token or any(key.lower() == "authorization" for key in self.metadata)

    def open(self, target: str, service: str, *, is_shared: bool = True) -> grpc.Channel:
        """Open a channel for synchronous calls of a service. Raises ValueError for a file that cannot be used.

        is_shared: share the connection with other channels to the target.
        """
        self._warn_of_plain_token(target)
        options = self._options(target, service)
        if not is_shared:
            options.append(_OWN_CONNECTION)
        if not self.is_encrypted:
            return grpc.insecure_channel(target, options=options)
        return grpc.secure_channel(target, self._credentials(), options=options)

    def open_async(self, target: str, service: str, *, is_shared: bool = True) -> grpc.aio.Channel:
        """Open a channel for an event loop. is_shared: share the connection with other channels to the target."""
        self._warn_of_plain_token(target)
        options = self._options(target, service)
        if not is_shared:
            options.append(_OWN_CONNECTION)
        if not self.is_encrypted:
            return grpc.aio.insecure_channel(target, options=options)
        return grpc.aio.secure_channel(target, self._credentials(), options=options)

    def _warn_of_plain_token(self, target: str) -> None:
        if self.has_token and not self.is_encrypted and not is_loopback(target):
            warnings.warn(f"the token is sent to {target} unencrypted; give tls or tls_ca", UserWarning, stacklevel=4)

    def _credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(
            root_certificates=_read("tls_ca", self.tls_ca),
            private_key=_read("tls_key", self.tls_key),
            certificate_chain=_read("tls_cert", self.tls_cert),
        )

    def _options(self, target: str, service: str) -> list[Option]:
        options: list[Option] = [
            ("grpc.service_config", json.dumps(self._service_config(service))),
            # A proxy named in the environment cannot reach the loopback of this machine.
            ("grpc.enable_http_proxy", 0 if is_loopback(target) else 1),
            ("grpc.max_receive_message_length", -1),  # attention maps exceed gRPC's default of 4 MiB
            ("grpc.per_rpc_retry_buffer_size", _RETRY_BUFFER_BYTES),
        ]
        if self.keepalive_s is not None:
            options.append(("grpc.keepalive_time_ms", round(self.keepalive_s * 1000)))
            # The effective timeout of a ping; without it gRPC waits a minute and ignores keepalive_timeout_ms.
            options.append(("grpc.http2.ping_timeout_ms", _KEEPALIVE_TIMEOUT_MS))
            # Otherwise gRPC pings a silent server twice, and then once a minute.
            options.append(("grpc.http2.max_pings_without_data", 0))
        if self.max_reconnect_s is not None:
            longest_ms = round(self.max_reconnect_s * 1000)
            options += [
                ("grpc.initial_reconnect_backoff_ms", min(1000, longest_ms)),
                ("grpc.max_reconnect_backoff_ms", longest_ms),
            ]
        if self.tls_server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls_server_name))
        return options

    def _service_config(self, service: str) -> dict[str, object]:
        method: dict[str, object] = {"name": [{"service": service}]}
        config: dict[str, object] = {
            "loadBalancingConfig": [{self.load_balancing: {}}],
            "methodConfig": [method],
        }
        if self.load_balancing == "round_robin" and not self._is_authorized:
            # Replicas that start or drain get no calls (gRFC A17). gRPC watches their health without credentials, which
            # servers with tokens refuse. With a token, calls go to such a replica and are refused by it.
            config["healthCheckConfig"] = {"serviceName": service}
        retry = self.retry
        if retry.attempts > 1:
            method["retryPolicy"] = {
                "maxAttempts": retry.attempts,
                "initialBackoff": f"{retry.backoff_s:.9f}s",
                "maxBackoff": f"{retry.max_backoff_s:.9f}s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": list(_RETRYABLE),
            }
            if retry.budget is not None:
                config["retryThrottling"] = {"maxTokens": retry.budget, "tokenRatio": retry.budget_ratio}
        return config


def is_loopback(target: str) -> bool:
    """Return whether every address of a target is on the loopback of this machine."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    name = target.rpartition("///")[2]
    addresses = name.removeprefix("ipv4:").removeprefix("ipv6:").removeprefix("dns:").split(",")
    return all(address.startswith(_LOOPBACK) for address in addresses)


def _read(name: str, path: str | os.PathLike[str] | None) -> bytes | None:
    if path is None:
        return None
    try:
        return read_regular(Path(path), MAX_FILE_BYTES)
    except OSError as error:
        raise ValueError(f"{name} is {os.fspath(path)}, which cannot be read: {error.strerror}") from None


def _check(name: str, value: float, minimum: float, maximum: float) -> None:
    if not minimum <= value <= maximum:
        raise ValueError(f"{name} is {value}; it must be {minimum} to {maximum}")


@dataclass(frozen=True, slots=True)
class Offer:
    """Answer to a GenerateMany call without requests.

    is_known: whether the server knows the method; None if it cannot be reached. worker, num_workers: the process that
    answered, of how many.
    """

    is_known: bool | None
    worker: int = 0
    num_workers: int = 1


def offer_of(code: grpc.StatusCode, trailers: Iterable[Any] | None) -> Offer:
    """Return the offer of a call that has ended."""
    is_known = {grpc.StatusCode.OK: True, grpc.StatusCode.UNIMPLEMENTED: False}.get(code)
    index = next((value for key, value in trailers or () if key == WORKER_KEY), "0/1")
    worker, _, num_workers = str(index).partition("/")
    return Offer(is_known, int(worker), int(num_workers))


class Placement:
    """Choice among connections: one to each process of the server whose first answer this is."""

    def __init__(self, first: Offer) -> None:
        self._num_workers = first.num_workers
        self._reached = {first.worker}
        self._num_attempts_left = _ATTEMPTS_PER_PROCESS * (first.num_workers - 1)

    def wants_more(self) -> bool:
        """Return whether to open another connection, and count it as an attempt."""
        self._num_attempts_left -= 1
        return self._num_attempts_left >= 0 and len(self._reached) < self._num_workers

    def keeps(self, offer: Offer) -> bool:
        """Return whether to keep a connection that was answered like this."""
        is_new = offer.is_known is True and offer.worker not in self._reached
        if is_new:
            self._reached.add(offer.worker)
        return is_new


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. A read of a FIFO or a terminal could block forever.

    Raises OSError, with the reason in strerror, for another kind of file, a file larger than max_bytes and an
    unreadable file.
    """
    with open(path, "rb", opener=_open_at_once) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes} bytes")
    return content


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
