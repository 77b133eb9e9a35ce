"""State of one RPC from its headers until its status is written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from antiphon.domain.errors import AntiphonError
from antiphon.observability.call import Call
from antiphon.observability.telemetry import Context
from antiphon.rpc.calls.status.core_cancel import cancel_call
from antiphon.rpc.calls.status.refusal import status_of
from antiphon.rpc.calls.waits.client_waits import Stage, Wait


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


@dataclass(slots=True, eq=False)
class Rpc:
    """RPC in flight.

    answer: unary answer that its client has not read; None before there is one. has_request: its request was read.
    """

    call: Call
    context: Context
    handler: asyncio.Task[Any] = field(default_factory=_current_task)
    answer: Wait | None = None
    has_request: bool = False

    def wait(self, stage: Stage, give_up: Callable[[AntiphonError], None], num_bytes: int = 0) -> Wait:
        """Return the record of this call's wait for its client."""
        return Wait(stage, self.call.caller, self.call.connection, give_up, num_bytes)

    def give_up_answer(self, error: AntiphonError) -> None:
        """End the call with an error instead of an answer that its client does not read."""
        code, message, _ = status_of(error)
        self.call.code, self.call.error = code.name, error
        cancel_call(self.context, code, message)
