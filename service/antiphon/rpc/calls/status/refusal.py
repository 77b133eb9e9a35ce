"""Converts a domain exception to a gRPC status: code, message and google.rpc details (AIP-193)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from antiphon.domain.errors import AntiphonError, InvalidArgument, QueueFull, Unauthenticated

DOMAIN = "antiphon"

_DETAILS_KEY = "grpc-status-details-bin"
_ROUNDED_FROM_MS = 1000
# Clients accept 8 KiB of trailers and turn more into a status of their own (grpc/grpc#37852). A message is there three
# times: percent-encoded, which can triple it, and twice in the details, which are sent in base64.
_MAX_MESSAGE_BYTES = 1024
_MAX_FIELD_BYTES = 256

Metadata = tuple[tuple[str, str | bytes], ...]


def status_of(error: AntiphonError) -> tuple[grpc.StatusCode, str, Metadata]:
    """Return status code, message and trailing metadata of a refusal.

    The metadata always holds google.rpc.Status with ErrorInfo. A bad field adds BadRequest. A full queue adds RetryInfo
    and a retry pushback for the client (gRFC A6). Long messages and field names, which can repeat a client's text, are
    cut.
    """
    code, message = grpc.StatusCode[error.status.name], _cut(str(error), _MAX_MESSAGE_BYTES)
    if isinstance(error, QueueFull):
        return code, message, _metadata_of_full(code, message, error.reason, pushback_ms(error))
    metadata: Metadata = ((_DETAILS_KEY, _packed(code, message, _details(error, message))),)
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


def _cut(text: str, max_bytes: int) -> str:
    """Return a text of at most max_bytes in UTF-8; a longer one ends with an ellipsis."""
    encoded = text.encode()
    return text if len(encoded) <= max_bytes else encoded[: max_bytes - 3].decode(errors="ignore") + "..."


def _details(error: AntiphonError, message: str) -> list[Message]:
    details: list[Message] = [_info(error.reason)]
    if isinstance(error, InvalidArgument):
        field = _cut(error.field, _MAX_FIELD_BYTES)
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    return details


def _info(reason: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN)
