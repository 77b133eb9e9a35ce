"""One call and the times of its messages. Never retries, so that every refusal is counted.

Works on messages and not on the client's types, because a cheaper client can create more load.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio

from antiphon.client import RetryPolicy
from antiphon.client.connection import SERVICE_NAME
from antiphon.client.messages import Languages, as_server_error, stream_request, unary_request
from antiphon.client.options import CallOptions, Options
from antiphon.load.calls.multiplexed import Multiplexed
from antiphon.load.calls.reading import Reading
from antiphon.load.calls.record import UNFINISHED, Outcome, Reply
from antiphon.load.plan import Ask, Plan
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    from antiphon.v1.inference_pb2_grpc import InferenceServiceAsyncStub

_UNFINISHED = Outcome(UNFINISHED)
_PUSHBACK = "grpc-retry-pushback-ms"


class Caller:
    """Connections of one process. Close it, or use it as a context manager."""

    def __init__(self, plan: Plan) -> None:
        """Prepare the requests; `connect` connects. Raises ValueError for an invalid ask or connection."""
        self._plan = plan
        self._call_options = CallOptions(plan.connection, timeout_s=plan.timeout_s, priority=plan.priority)
        connection = replace(plan.connection, retry=RetryPolicy(attempts=1))
        self._channels = [
            connection.open_async(plan.target, SERVICE_NAME, is_shared=False) for _ in range(plan.connections)
        ]
        self._stubs: list[InferenceServiceAsyncStub] = [
            inference_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels
        ]
        is_streamed = plan.is_streaming or plan.is_multiplexed
        self._streamed = (
            [self._call_options.set_priority(_streamed(plan, ask)) for ask in plan.asks] if is_streamed else []
        )
        self._whole = [] if is_streamed else [self._call_options.set_priority(_whole(plan, ask)) for ask in plan.asks]
        self._multiplexed = (
            [Multiplexed(stub, self._call_options, plan, self._streamed) for stub in self._stubs]
            if plan.is_multiplexed
            else []
        )
        self._turn = 0

    async def connect(self) -> None:
        """Wait until every connection is ready. Raises TimeoutError."""
        await asyncio.wait_for(
            asyncio.gather(*(channel.channel_ready() for channel in self._channels)), self._plan.timeout_s
        )

    async def call(
        self, ask: int, scheduled_s: float, start_s: float, on_first: Callable[[], None] = lambda: None
    ) -> Reply:
        """Make one call and return its result; an error is also a result.

        start_s: time.monotonic() at the start of the run. on_first: called when the first message of a stream arrives.
        """
        sent_s = time.monotonic() - start_s
        reply = Reply(scheduled_s=scheduled_s, sent_s=sent_s, last_s=sent_s, outcome=_UNFINISHED)
        self._turn = (self._turn + 1) % len(self._stubs)
        stub = self._stubs[self._turn]
        reading = Reading(reply, start_s, on_first, keeps_text=self._plan.check)
        try:
            if self._multiplexed:
                await self._multiplexed[self._turn].ask(ask, reading)
            elif self._plan.is_streaming:
                await self._stream(stub, ask, reading)
            else:
                reading.whole(await stub.GenerateUnary(self._whole[ask], **self._call_options.arguments()))
            reading.end()
        except grpc.aio.AioRpcError as error:
            reply.outcome, reply.message = _outcome(error), error.details() or "no message"
        except asyncio.CancelledError:
            reply.outcome = _UNFINISHED
        reply.last_s = time.monotonic() - start_s
        return reply

    async def _stream(self, stub: InferenceServiceAsyncStub, ask: int, reading: Reading) -> None:
        call = stub.Generate(self._streamed[ask], **self._call_options.arguments())
        try:
            async for message in call:
                reading.delta(message, time.monotonic())
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the connections, which ends running calls."""
        await asyncio.gather(*(calls.close() for calls in self._multiplexed))
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _streamed(plan: Plan, ask: Ask) -> pb.GenerateRequest:
    return stream_request(plan.model, ask.source, _options(plan, ask), Languages())


def _whole(plan: Plan, ask: Ask) -> pb.GenerateUnaryRequest:
    return unary_request(plan.model, ask.source, _options(plan, ask), Languages())


def _options(plan: Plan, ask: Ask) -> Options:
    return Options(max_new_tokens=ask.max_new_tokens, ignore_eos=plan.ignore_eos or None)


def _outcome(error: grpc.aio.AioRpcError) -> Outcome:
    refusal = as_server_error(error)
    has_pushback = any(key == _PUSHBACK for key, _ in error.trailing_metadata() or ())
    return Outcome(refusal.code.name, refusal.reason, has_pushback)
