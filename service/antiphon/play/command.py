"""`antiphon play`: serves the page on loopback until it is interrupted. A client; loads no model itself."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import replace

import uvicorn

from antiphon.cli.common import report_error
from antiphon.cli.connection_flags import add_connection_flags, connection_problem, read_connection
from antiphon.client import DEFAULT_TARGET, RetryPolicy
from antiphon.play.app import build_app
from antiphon.play.model_server import Addresses, ModelServer

DEFAULT_PORT = 8050

_HOST = "127.0.0.1"
# The page shows a refusal with its advice, and asks again itself.
_RETRY = RetryPolicy(attempts=1)
_DEFAULT_METRICS_PORT = 9090
# Answers that still run at Ctrl-C are cancelled after this time.
_GRACE_S = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon play`."""
    parser.add_argument("--target", default=DEFAULT_TARGET, metavar="HOST:PORT", help="server (default: %(default)s)")
    parser.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, metavar="N", help="port of the page; 0: any (default: %(default)s)"
    )
    parser.add_argument(
        "--metrics-url",
        metavar="URL",
        help=f"the server's metrics (default: http://HOST:{_DEFAULT_METRICS_PORT}/metrics of the target's host)",
    )
    parser.add_argument(
        "--admin-target",
        metavar="HOST:PORT",
        help="admin service of the server, to show which request holds which cache block (default: none)",
    )
    parser.add_argument(
        "--admin-token-file",
        metavar="FILE",
        help="file with the bearer token of --admin-target (default: --token-file)",
    )
    add_connection_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve the page and return the exit code."""
    try:
        with _listening(arguments.port) as listener:
            asyncio.run(_serve(arguments, listener))
    except ValueError as error:
        return report_error("play", connection_problem(error))
    except OSError as error:
        return report_error("play", f"--port {arguments.port}: {error.strerror}")
    except KeyboardInterrupt:  # the usual end
        pass
    return 0


async def _serve(arguments: argparse.Namespace, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    connection = read_connection(arguments, _RETRY, max_reconnect_s=1.0)
    of_admin = replace(connection, token_file=arguments.admin_token_file or connection.token_file)
    server = ModelServer(_addresses(arguments), connection, of_admin)
    app = build_app(server, [f"{name}:{port}" for name in (_HOST, "localhost")])
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_S)
    print(f"antiphon play: http://{_HOST}:{port} shows the models of {arguments.target}; Ctrl-C ends it", flush=True)
    await uvicorn.Server(config).serve(sockets=[listener])


def _addresses(arguments: argparse.Namespace) -> Addresses:
    host = arguments.target.rpartition("/")[2].rpartition(":")[0] or _HOST
    metrics_url = arguments.metrics_url or f"http://{host}:{_DEFAULT_METRICS_PORT}/metrics"
    if not metrics_url.startswith(("http://", "https://")):
        raise ValueError(f"--metrics-url is {metrics_url!r}; it must begin with http:// or https://")
    return Addresses(target=arguments.target, metrics_url=metrics_url, admin_target=arguments.admin_target)


@contextlib.contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    """Open the page's port, on loopback only. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_HOST, port))
        listener.listen()  # before the address is printed: a browser may be faster than the server's start
        yield listener


def _port(text: str) -> int:
    """Read a port number. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: 0 to 65535")
    return int(text)
