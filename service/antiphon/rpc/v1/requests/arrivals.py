"""Arrivals of requests: id, client, priority and deadline, taken before any text is tokenised."""

from __future__ import annotations

import itertools
from typing import Any

import grpc.aio

from antiphon.domain.caller import caller_of
from antiphon.domain.errors import InvalidArgument
from antiphon.domain.request import Arrival, Priority
from antiphon.engine.engine import Engine
from antiphon.observability.call import current_call
from antiphon.rpc.grpc_fixes.deadline import remaining_s
from antiphon.rpc.v1.requests.inputs import HasSource
from antiphon.v1 import inference_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]
EngineMessage = HasSource | pb.TagRequest
"""Messages whose requests run on the engine."""

_PRIORITIES = {
    pb.PRIORITY_UNSPECIFIED: Priority.INTERACTIVE,
    pb.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
    pb.PRIORITY_BATCH: Priority.BATCH,
}


class Arrivals:
    """Gives arrivals to the requests of one engine. For the event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()

    def next(self, message: EngineMessage, context: Context) -> Arrival:
        """Return the arrival of the current call's request. Raises InvalidArgument, or QueueFull if full."""
        priority = _PRIORITIES.get(message.priority)
        if priority is None:
            raise InvalidArgument("priority", message.priority, "PRIORITY_INTERACTIVE or PRIORITY_BATCH")
        call = current_call()
        client = caller_of(context) if call is None else call.caller
        self._engine.check_room(client, priority)
        arrival_s = self._engine.clock()
        left_s = remaining_s(context)
        return Arrival(
            # The number makes the id unique: clients may send the same id twice.
            request_id=f"{call.request_id if call else ''}/{next(self._numbers)}",
            arrival_s=arrival_s,
            deadline_s=None if left_s is None else arrival_s + left_s,
            client=client,
            priority=priority,
            trace_id=call.trace_id if call else "",
        )
