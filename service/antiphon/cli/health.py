"""`antiphon health`: reports the readiness of a running server as an exit code. The image's health check runs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from antiphon.cli.common import above_zero, report_error
from antiphon.cli.connection_flags import add_connection_flags, connection_problem, read_connection
from antiphon.client.connection import DEFAULT_TARGET, RetryPolicy
from antiphon.client.messages import ServerError, server_errors
from antiphon.client.options import CallOptions

EXIT_NOT_SERVING = 1

_SERVICE_NAME = "grpc.health.v1.Health"
# HealthCheckResponse.ServingStatus, by number.
_STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
_PORT_VARIABLES = ("ANTIPHON_PROBE_PORT", "ANTIPHON_PORT")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `antiphon health`."""
    parser.add_argument(
        "--target",
        metavar="HOST:PORT",
        help=f"server (default: 127.0.0.1, port of {' or '.join(_PORT_VARIABLES)}; else {DEFAULT_TARGET})",
    )
    parser.add_argument(
        "--service",
        default="",
        metavar="NAME",
        help='health name to check: "liveness", or a service, or SERVICE/MODEL (default: whether all models are ready)',
    )
    parser.add_argument(
        "--timeout-s", type=above_zero, default=2.0, metavar="S", help="maximum wait (default: %(default)s)"
    )
    add_connection_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ask once. Return 0 if the status is SERVING, 1 for another status or no answer, 2 for a wrong setting."""
    try:
        target = arguments.target or own_target(os.environ)
        status = _check(arguments, target)
    except ServerError as error:
        print(f"antiphon health: {target}{_of(arguments.service)} {_reason(error)}", file=sys.stderr)
        return EXIT_NOT_SERVING
    except ValueError as error:
        return report_error("health", connection_problem(error))
    is_serving = status == "SERVING"
    print(f"antiphon health: {target}{_of(arguments.service)} is {status}", file=None if is_serving else sys.stderr)
    return 0 if is_serving else EXIT_NOT_SERVING


def own_target(environ: Mapping[str, str]) -> str:
    """Return the health address of the server that runs in the same environment, such as the same container.

    The port that needs no certificate comes first. Raises ValueError for an invalid port.
    """
    for name in _PORT_VARIABLES:
        value = environ.get(name)
        if value is not None:
            if not (value.isdecimal() and 1 <= int(value) <= 65535):
                raise ValueError(f"{name} is {value!r}; it must be 1 to 65535, or give --target")
            return f"127.0.0.1:{value}"
    return DEFAULT_TARGET


def _check(arguments: argparse.Namespace, target: str) -> str:
    connection = read_connection(arguments, RetryPolicy(attempts=1))
    call_options = CallOptions(connection)
    with connection.open(target, _SERVICE_NAME) as channel:
        # Same bytes as HealthCheckRequest and HealthCheckResponse, which a client installation does not have.
        check = channel.unary_unary(
            f"/{_SERVICE_NAME}/Check",
            request_serializer=StringValue.SerializeToString,
            response_deserializer=Int32Value.FromString,
        )
        with server_errors():
            number = check(StringValue(value=arguments.service), **call_options.arguments(arguments.timeout_s)).value
    return _STATUSES[number] if 0 <= number < len(_STATUSES) else str(number)


def _of(service: str) -> str:
    return f", service {service}," if service else ""


def _reason(error: ServerError) -> str:
    if error.code is grpc.StatusCode.NOT_FOUND:
        return "is not known there"
    return f"gives no answer: {error.message} ({error.code.name})"
