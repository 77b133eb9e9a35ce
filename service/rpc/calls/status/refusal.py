"""Converts a domain exception to a gRPC status: code, message and google.rpc details (AIP-193)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from antiphon.service.domain.errors import AntiphonError, InvalidArgument, QueueFull, Unauthenticated

DOMAIN = "antiphon"

_DETAILS_KEY = "grpc-status-details-bin"
_ROUNDED_FROM_MS = 1000

Metadata = tuple[tuple[str, str | bytes], ...]


def status_of(error: AntiphonError) -> tuple[grpc.StatusCode, str, Metadata]:
    """Return status code, message and trailing metadata of a refusal.

    The metadata always holds google.rpc.Status with ErrorInfo. A bad field adds BadRequest. A full queue adds RetryInfo
    and a retry pushback for the client (gRFC A6).
    """
    code, message = grpc.StatusCode[error.status.name], str(error)
    if isinstance(error, QueueFull):
        return code, message, _metadata_of_full(code, message, error.reason, pushback_ms(error))
    metadata: Metadata = ((_DETAILS_KEY, _packed(code, message, _details(error))),)
    if isinstance(error, Unauthenticated):
        metadata += (("www-authenticate", error.challenge),)
    return code, message, metadata


def pushback_ms(error: QueueFull) -> int:
    """Return the retry delay, at least 1: after a 0, gRPC clients hang until their deadline (grpc/grpc#41036).

    Delays of a second or more are rounded up to tenths, so that the metadata of many refusals are equal.
    """
    delay_ms = math.ceil(error.retry_after_s * 1000)
    return max(1, delay_ms if delay_ms < _ROUNDED_FROM_MS else math.ceil(delay_ms / 100) * 100)


@lru_cache(maxsize=256)
def _metadata_of_full(code: grpc.StatusCode, message: str, reason: str, delay_ms: int) -> Metadata:
    """Return the metadata of a full queue. An overloaded server refuses thousands of calls a second."""
    delay = Duration()
    delay.FromMilliseconds(delay_ms)
    details = [_info(reason), error_details_pb2.RetryInfo(retry_delay=delay)]
    return (_DETAILS_KEY, _packed(code, message, details)), ("grpc-retry-pushback-ms", str(delay_ms))


def _packed(code: grpc.StatusCode, message: str, details: Iterable[Message]) -> bytes:
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        status.details.add().Pack(detail)
    packed: bytes = status.SerializeToString()
    return packed


def _details(error: AntiphonError) -> list[Message]:
    details: list[Message] = [_info(error.reason)]
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    return details


def _info(reason: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)
