"""Ends a call that its client keeps open, with a status of our choice.

gRPC's core can end a call at any time: it drops the messages that wait for the client's window, and sends the status.
grpc.aio offers no method for that. Its `_ServicerContext.peer_identities` lends core's call, as an object that can be
cancelled, to the module's function of the same name, which is replaced here for the length of one lookup.
tests/integration/test_unread_answers.py holds new versions of grpcio to it.
"""

from __future__ import annotations

from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from antiphon.service.observability.telemetry import Context


def cancel_call(context: Context, code: grpc.StatusCode, message: str) -> None:
    """End a call for both sides; without effect on one that has ended. For the event loop of the call."""

    def cancel(call: Any) -> None:
        call.cancel(code.value[0], message)

    original, cygrpc.peer_identities = cygrpc.peer_identities, cancel
    try:
        context.peer_identities()
    finally:
        cygrpc.peer_identities = original
