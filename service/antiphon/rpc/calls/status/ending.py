"""Final status of a call: choosing it and sending it."""

from __future__ import annotations

import asyncio
import logging
from typing import cast

import grpc
import grpc.aio

from antiphon.domain.errors import AntiphonError, EngineFault
from antiphon.domain.request import CancelCause
from antiphon.observability.call import Call
from antiphon.observability.logs.formats import where_of
from antiphon.observability.telemetry import Context
from antiphon.rpc.calls.status.core_cancel import cancel_call
from antiphon.rpc.calls.status.deadline import remaining_s
from antiphon.rpc.calls.status.refusal import Metadata, status_of

log = logging.getLogger(__name__)

# Time for the status of a failed call to follow a message that its client does not read.
_STATUS_PATIENCE_S = 2.0


class ClientGone(Exception):
    """The client has ended the call, so no status can be sent."""


def failure_of(call: Call, context: Context, error: BaseException) -> tuple[grpc.StatusCode, str, Metadata] | None:
    """Record how a call failed. Return the status to send; None if the call has ended already."""
    if isinstance(error, (grpc.aio.AbortError, grpc.aio.UsageError)):
        call.code = code_of(context)
        return None
    if not isinstance(error, Exception):  # CancelledError: the client or the server has ended the call
        sent = code_of(context)
        call.code = sent if sent != "OK" else "DEADLINE_EXCEEDED" if _is_late(call, context) else "CANCELLED"
        return None
    if not isinstance(error, AntiphonError):
        log.error("%s failed", call.method, extra={"fields": {"exception": where_of(error)}})
        error = EngineFault("the server failed; its log says why")
    forget_frames(error)  # the error outlives the call, as a part of its record
    call.error = error
    code, message, metadata = status_of(error)
    call.code = code.name
    return code, message, metadata


async def abort(call: Call, context: Context, code: grpc.StatusCode, message: str, metadata: Metadata) -> None:
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


def code_of(context: Context) -> str:
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


def _is_late(call: Call, context: Context) -> bool:
    """Return whether a cancelled call had exceeded its deadline. The causes recorded for its requests come first."""
    causes = [cause for admitted in call.requests if (cause := admitted.stream.cancel_cause) is not None]
    if causes:
        return CancelCause.DEADLINE in causes
    left_s = remaining_s(context)
    return left_s is not None and left_s <= 0
