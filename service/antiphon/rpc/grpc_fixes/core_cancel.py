"""Ends a call that its client keeps open, with a chosen status.

Cause: gRPC's core can end a call at any time: it drops the messages that wait for the client's flow-control window, and
sends the status. grpc.aio has no method for that. Its `_ServicerContext.peer_identities` passes core's call object,
which can be cancelled, to the module function of the same name. This module replaces that function during one lookup.
Upstream: no issue is known. Cost: none for calls that are not ended by this.
Remove this module once a ServicerContext can end its call with a status while a message waits. Until then,
tests/integration/test_unread_answers.py checks that this works with new versions of grpcio.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]


def cancel_call(context: grpc.aio.ServicerContext[Any, Any], code: grpc.StatusCode, message: str) -> None:
    """End a call for both sides. Has no effect on a call that has ended. For the event loop of the call."""

    def cancel(call: Any) -> None:
        call.cancel(code.value[0], message)

    original, cygrpc.peer_identities = cygrpc.peer_identities, cancel
    try:
        context.peer_identities()
    finally:
        cygrpc.peer_identities = original
