"""Final status of a call: an error becomes code, message and google.rpc details (AIP-193), and is sent."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import cast

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from antiphon.domain.errors import AntiphonError, EngineFault, InvalidArgument, QueueFull, Unauthenticated
from antiphon.domain.request import CancelCause
from antiphon.observability.call import CallRecord
from antiphon.observability.logging import where_of
from antiphon.rpc.context import GrpcContext, Metadata, RequestContext
from antiphon.rpc.grpc_fixes.core_cancel import cancel_call

DOMAIN = "antiphon"

_DETAILS_KEY = "grpc-status-details-bin"
_ROUNDED_FROM_MS = 1000
# Clients accept 8 KiB of trailers and turn more into a status of their own (grpc/grpc#37852). A message is there three
# times: percent-encoded, which can triple it, and twice in the details, which are sent in base64.
_MAX_MESSAGE_BYTES = 1024
_MAX_FIELD_BYTES = 256


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


log = logging.getLogger(__name__)

# Time for the status of a failed call to follow a message that its client does not read.
_STATUS_PATIENCE_S = 2.0


class ClientGone(Exception):
    """The client has ended the call, so no status can be sent."""


def failure_of(
    context: RequestContext, grpc_context: GrpcContext, error: BaseException
) -> tuple[grpc.StatusCode, str, Metadata] | None:
    """Record how a call failed. Return the status to send; None if the call has ended already."""
    call = context.record
    if isinstance(error, (grpc.aio.AbortError, grpc.aio.UsageError)):
        call.code = code_of(grpc_context)
        return None
    if not isinstance(error, Exception):  # CancelledError: the client or the server has ended the call
        sent = code_of(grpc_context)
        call.code = sent if sent != "OK" else "DEADLINE_EXCEEDED" if _is_late(context) else "CANCELLED"
        return None
    if not isinstance(error, AntiphonError):
        log.error("%s failed", call.method, extra={"fields": {"exception": where_of(error)}})
        error = EngineFault("the server failed; its log says why")
    forget_frames(error)  # the error outlives the call, as a part of its record
    call.error = error
    code, message, metadata = status_of(error)
    call.code = code.name
    return code, message, metadata


async def abort(
    call: CallRecord, context: GrpcContext, code: grpc.StatusCode, message: str, metadata: Metadata
) -> None:
    """End an RPC with a status. Drops a message that its client does not read, and sends the status alone.

    Raises AbortError once the status is sent, ClientGone if nothing can be sent any more.
    """
    try:
        if not call.has_written:  # no message is queued before the status
            await context.abort(code, message, metadata)
        async with asyncio.timeout(_STATUS_PATIENCE_S):
            await context.abort(code, message, metadata)
    except grpc.aio.AbortError as aborted:
        asyncio.get_running_loop().call_soon(forget_frames, aborted)  # gRPC keeps the exception
        raise
    except TimeoutError:
        cancel_call(context, code, message)
    except grpc.aio.InternalError:
        raise ClientGone from None


def code_of(context: GrpcContext) -> str:
    """Return the name of the status that a method has set, OK if it has set none."""
    code = cast("grpc.StatusCode | int | None", context.code())
    if not code:
        return "OK"
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((known.name for known in grpc.StatusCode if known.value[0] == code), "UNKNOWN")


def forget_frames(error: BaseException | None) -> None:
    """Drop the frames of an error and of its causes: they reference the request and the context of the call."""
    while error is not None:
        error.__traceback__ = None
        error = error.__context__


def _is_late(context: RequestContext) -> bool:
    """Return whether a cancelled call had exceeded its deadline. The causes recorded for its requests come first."""
    causes = [cause for admitted in context.record.requests if (cause := admitted.stream.cancel_cause) is not None]
    if causes:
        return CancelCause.DEADLINE in causes
    left_s = context.remaining_s()
    return left_s is not None and left_s <= 0
