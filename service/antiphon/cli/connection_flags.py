"""Flags of every command that talks to a server: target, encryption, token, priority, deadline; its refusals."""

from __future__ import annotations

import argparse
import re
from typing import TypedDict

import grpc

from antiphon.cli.common import above_zero
from antiphon.client import DEFAULT_TARGET, ServerError
from antiphon.client.connection import Connection, RetryPolicy
from antiphon.client.options import PRIORITIES, Priority

# A command has no retry budget: during an overload each line has its full number of attempts.
_RETRY = RetryPolicy(budget=None)
_FIELDS = ("tls", "tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file", "load_balancing")
_FIELD = re.compile(r"\b(tls_ca|tls_cert|tls_key|token_file|connections)\b")


class ClientArguments(TypedDict):
    """Keyword arguments of a client that come from flags."""

    connection: Connection
    timeout_s: float | None
    priority: Priority | None


def add_target_flag(parser: argparse._ActionsContainer) -> None:
    """Add the flag of the server's address."""
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="server (default: %(default)s)")


def add_model_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags of the server's address and of the model."""
    add_target_flag(parser)
    parser.add_argument("--model", default="", metavar="NAME", help="model that answers (default: the server's first)")


def add_connection_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a connection to a server."""
    group = parser.add_argument_group("connection")
    group.add_argument("--tls", action="store_true", help="encrypt; trust the authorities of gRPC's list")
    group.add_argument("--tls-ca", metavar="FILE", help="encrypt; trust the authorities in this PEM file")
    group.add_argument("--tls-cert", metavar="FILE", help="certificate to present to the server (mutual TLS)")
    group.add_argument("--tls-key", metavar="FILE", help="private key of --tls-cert")
    group.add_argument("--tls-server-name", metavar="NAME", help="name in the server's certificate (default: target's)")
    group.add_argument("--token-file", metavar="FILE", help="file with the bearer token")
    group.add_argument(
        "--load-balancing",
        choices=("pick_first", "round_robin"),
        default="pick_first",
        help="choice among the target's addresses (default: %(default)s)",
    )


def add_call_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands that send requests to a model."""
    parser.add_argument(
        "--priority",
        choices=tuple(PRIORITIES),
        help="batch gives interactive requests precedence (default: server's)",
    )
    parser.add_argument(
        "--timeout-s", type=above_zero, metavar="S", help="deadline of each request, retries included (default: none)"
    )
    parser.add_argument(
        "--connections",
        type=int,
        metavar="N",
        help="connections to the server (default: one; for many requests one to each of its processes)",
    )


def read_connection(
    arguments: argparse.Namespace,
    retry: RetryPolicy = _RETRY,
    *,
    connections: int | None = None,
    max_reconnect_s: float | None = None,
) -> Connection:
    """Return the connection that the flags describe. Raises ValueError."""
    flags = {name: getattr(arguments, name) for name in _FIELDS}
    return Connection(**flags, retry=retry, connections=connections, max_reconnect_s=max_reconnect_s)


def read_client_flags(arguments: argparse.Namespace) -> ClientArguments:
    """Return the arguments of a client that the flags describe. Raises ValueError."""
    return {
        "connection": read_connection(arguments, connections=arguments.connections),
        "timeout_s": arguments.timeout_s,
        "priority": arguments.priority,
    }


def connection_problem(error: ValueError) -> str:
    """Return the message of a connection error, with flags in place of field names."""
    return _FIELD.sub(lambda match: f"--{match[0].replace('_', '-')}", str(error))


def server_problem(
    error: ServerError, target: str, *, command: str = "antiphon serve", participle: str = "running"
) -> str:
    """Return the message of a failed call; if the server is unavailable, with the command that starts one."""
    if error.code is not grpc.StatusCode.UNAVAILABLE:
        return error.message
    return f"{target} is unavailable ({error.message}); is a server {participle} there? start one with: {command}"
