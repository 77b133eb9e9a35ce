"""Converts a domain exception to a gRPC status: code, message and google.rpc details (AIP-193)."""

from __future__ import annotations

import math

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from antiphon.service.domain.errors import AntiphonError, InvalidArgument, QueueFull, Unauthenticated

DOMAIN = "antiphon"

Metadata = tuple[tuple[str, str | bytes], ...]


def status_of(error: AntiphonError) -> tuple[grpc.StatusCode, str, Metadata]:
    """Return status code, message and trailing metadata of a refusal.

    The metadata always holds google.rpc.Status with ErrorInfo. A bad field adds BadRequest. A full queue adds RetryInfo
    and a retry pushback for the client (gRFC A6).
    """
    code = grpc.StatusCode[error.status.name]
    status = status_pb2.Status(code=code.value[0], message=str(error))
    for detail in _details(error):
        status.details.add().Pack(detail)
    metadata: Metadata = (("grpc-status-details-bin", status.SerializeToString()),)
    if isinstance(error, QueueFull):
        metadata += (("grpc-retry-pushback-ms", str(pushback_ms(error))),)
    if isinstance(error, Unauthenticated):
        metadata += (("www-authenticate", error.challenge),)
    return code, str(error), metadata


def pushback_ms(error: QueueFull) -> int:
    """Return the retry delay, at least 1: after a 0, gRPC clients hang until their deadline (grpc/grpc#41036)."""
    return max(1, math.ceil(error.retry_after_s * 1000))


def _details(error: AntiphonError) -> list[Message]:
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if isinstance(error, InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=str(error))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, QueueFull):
        delay = Duration(nanos=0)
        delay.FromMilliseconds(pushback_ms(error))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details
