"""Context of one request, passed explicitly to its handler: id, caller, deadline, record, and the way to its client."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import grpc.aio

from antiphon.observability.call import REQUEST_ID_KEY, CallRecord
from antiphon.rpc.client_waits import ClientWaits, Writer

GrpcContext = grpc.aio.ServicerContext[Any, Any]
"""gRPC's own context of a call: for middlewares, and for services that are not ours."""
Metadata = tuple[tuple[str, str | bytes], ...]
Send = Callable[[bytes], Awaitable[None]]
"""Sends a serialised message. Returns when the client's flow control has accepted it."""

# Properties of a client's certificate in gRPC's auth context; each is a list.
_ALTERNATIVE, _COMMON = "x509_subject_alternative_name", "x509_common_name"


@dataclass(slots=True, eq=False, kw_only=True)
class RequestContext:
    """Request of a client: a call, or one of the requests of a call. A cancelled request's task is cancelled."""

    record: CallRecord
    """Account of the request for metrics, logs and spans."""
    metadata: Metadata
    """Metadata of the call from its client."""
    deadline_s: float | None
    """Time of `time.monotonic` until which the client waits; None if there is no limit or it is unknown."""
    waits: ClientWaits
    """Calls that wait for their clients; this one is there while it sends a message."""
    send: Send
    """Sends one message of a streamed answer. Handlers mostly use `writer`, which limits the time of a message."""
    send_headers: Callable[[Metadata], Awaitable[None]] | None
    """Sends the headers of the answer; None where the writer of the call's own messages does."""

    @property
    def request_id(self) -> str:
        """Id of the request in logs and in the trailers of its call."""
        return self.record.request_id

    @property
    def caller(self) -> str:
        """Name of the client, by which clients share the server."""
        return self.record.caller

    def remaining_s(self) -> float | None:
        """Return the seconds until the deadline, 0 once it has passed; None if there is none or it is unknown."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())

    def writer(self, backlog_bytes: Callable[[], int] | None = None) -> Writer:
        """Return the writer of a streamed answer. backlog_bytes: memory of what is ready to follow a message."""
        headers = ((REQUEST_ID_KEY, self.request_id),)
        send_headers = self.send_headers
        begin = None if send_headers is None else lambda: send_headers(headers)
        return Writer(self.waits, self.record, self.send, begin, backlog_bytes)

    def derive(
        self, *, record: CallRecord | None = None, timeout_s: float | None = None, send: Send | None = None
    ) -> RequestContext:
        """Return the context of one request of this call.

        record: its own account. timeout_s: a time limit from now on; the call's deadline holds too.
        send: sends its messages as a part of the call's answer.
        """
        deadline_s = self.deadline_s
        if timeout_s is not None:
            own_s = time.monotonic() + timeout_s
            deadline_s = own_s if deadline_s is None else min(deadline_s, own_s)
        return RequestContext(
            record=record or self.record,
            metadata=self.metadata,
            deadline_s=deadline_s,
            waits=self.waits,
            send=send or self.send,
            send_headers=self.send_headers if send is None else None,
        )


_authenticated: ContextVar[str | None] = ContextVar("antiphon_caller", default=None)
enter_caller = _authenticated.set
"""Set the caller's name for the current RPC: gRPC lets an interceptor pass nothing else to the handler of a call."""


def caller_of(context: GrpcContext, connection: str) -> str:
    """Return the caller's name from its token or a trusted proxy, else from its client certificate, else its host.

    connection: address of the client's end. The host has no port, so all connections of one client are one caller.
    """
    name = _authenticated.get() or _certified(cast("Mapping[str, Sequence[bytes]]", context.auth_context()))
    return name or connection.rpartition(":")[0]


def _certified(properties: Mapping[str, Sequence[bytes]]) -> str | None:
    """Return the name in a client's certificate: a URI (SPIFFE), else the common name, else any other name."""
    if _ALTERNATIVE not in properties and _COMMON not in properties:  # true of every call without a certificate
        return None
    names = [name.decode("utf-8", "replace") for name in properties.get(_ALTERNATIVE, ())]
    common = [name.decode("utf-8", "replace") for name in properties.get(_COMMON, ())]
    uris = [name for name in names if "://" in name]
    return next((name for name in (*uris, *common, *names) if name), None)
