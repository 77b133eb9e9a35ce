"""Calls of a plan to a server: their messages, and the times of these. Never retries, so that every refusal is counted.

Works on messages and not on the types of the client, because a cheaper client can create more load.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio

from antiphon.client import RetryPolicy
from antiphon.client.connection import SERVICE_NAME
from antiphon.client.many import early_end, pack
from antiphon.client.many_tasks import end_of_call
from antiphon.client.messages import Languages, ServerError, as_server_error, stream_request, unary_request
from antiphon.client.options import CallOptions, Options
from antiphon.load.plan import Ask, Plan
from antiphon.load.results import INCOMPLETE, OK, UNFINISHED, Outcome, Reply
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    from antiphon.v1.inference_pb2_grpc import InferenceServiceAsyncStub

Call = grpc.aio.StreamStreamCall[pb.GenerateManyRequest, pb.GenerateManyResponse]

_OK = Outcome(OK)
_UNFINISHED = Outcome(UNFINISHED)
_INCOMPLETE = Outcome(INCOMPLETE)
_PUSHBACK = "grpc-retry-pushback-ms"
_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


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
        builder = ReplyBuilder(reply, start_s, on_first, keeps_text=self._plan.check)
        try:
            if self._multiplexed:
                await self._multiplexed[self._turn].send(ask, builder)
            elif self._plan.is_streaming:
                await self._stream(stub, ask, builder)
            else:
                builder.whole(await stub.GenerateUnary(self._whole[ask], **self._call_options.arguments()))
            builder.end()
        except grpc.aio.AioRpcError as error:
            reply.outcome, reply.message = _outcome_of_error(error), error.details() or "no message"
        except asyncio.CancelledError:
            reply.outcome = _UNFINISHED
        reply.last_s = time.monotonic() - start_s
        return reply

    async def _stream(self, stub: InferenceServiceAsyncStub, ask: int, builder: ReplyBuilder) -> None:
        call = stub.Generate(self._streamed[ask], **self._call_options.arguments())
        try:
            async for message in call:
                builder.delta(message, time.monotonic())
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


def _outcome_of_error(error: grpc.aio.AioRpcError) -> Outcome:
    refusal = as_server_error(error)
    has_pushback = any(key == _PUSHBACK for key, _ in error.trailing_metadata() or ())
    return Outcome(refusal.code.name, refusal.reason, has_pushback)


class ReplyBuilder:
    """Builder of the Reply to one request from its messages: times, tokens, text, and the end of its only output.

    start_s: time.monotonic() at the start of the run. on_first: called when the first message of a stream arrives.
    keeps_text: the reply gets the text of all outputs.
    """

    def __init__(self, reply: Reply, start_s: float, on_first: Callable[[], None], *, keeps_text: bool) -> None:
        self._reply = reply
        self._start_s = start_s
        self._on_first = on_first
        self._keeps_text = keeps_text
        self._texts: list[str] = []
        self._num_ends = 0
        self._previous_s = 0.0
        self._is_refused = False

    def delta(self, message: pb.GenerateResponse, now_s: float) -> None:
        """Note a message of a stream that arrived at a time of time.monotonic()."""
        reply, at_s = self._reply, now_s - self._start_s
        if reply.first_s is None:
            reply.first_s = at_s
            self._on_first()
        else:
            reply.gaps_s.append(at_s - self._previous_s)
        self._previous_s = at_s
        self._num_ends += message.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        if self._keeps_text:
            self._texts.append(message.text_delta)
        if message.HasField("usage"):
            reply.num_tokens = message.usage.generated_tokens

    def whole(self, message: pb.GenerateUnaryResponse) -> None:
        """Note a complete answer."""
        self._num_ends = len(message.outputs)
        self._reply.num_tokens = message.usage.generated_tokens
        self._texts = [output.text for output in message.outputs]

    def refused(self, outcome: Outcome, message: str) -> None:
        """Note an error."""
        self._is_refused = True
        self._reply.outcome, self._reply.message = outcome, message

    def end(self) -> None:
        """Complete the reply after the last message: its only output must have ended exactly once."""
        self._reply.text = "".join(self._texts)
        if self._is_refused:
            return
        if self._num_ends == 1:
            self._reply.outcome = _OK
        else:
            self._reply.outcome, self._reply.message = _INCOMPLETE, f"{self._num_ends} ends of one output"


class Multiplexed:
    """One GenerateMany call for all requests of a connection, opened with a request, and again after it has ended.

    The client's own implementation would change the measurement: it sends failed requests again, limits how many are
    unanswered, and returns outcomes in the order of their sources, without times of messages.

    requests: of the plan's asks.
    """

    def __init__(
        self, stub: InferenceServiceAsyncStub, call_options: CallOptions, plan: Plan, requests: list[pb.GenerateRequest]
    ) -> None:
        self._stub = stub
        self._call_options = call_options
        self._messages = [
            pb.ManyRequest(request=request, timeout_millis=max(1, round(plan.timeout_s * 1000))) for request in requests
        ]
        for message in self._messages:
            message.is_whole = not plan.is_streaming
        self._open: dict[int, tuple[ReplyBuilder, asyncio.Future[None]]] = {}
        self._next_id = 0
        self._unsent: list[pb.ManyRequest] = []
        self._cancelled: list[int] = []
        self._has_unsent = asyncio.Event()
        self._conversation: asyncio.Task[None] | None = None

    async def send(self, index: int, builder: ReplyBuilder) -> None:
        """Send a request and read its answers."""
        request = pb.ManyRequest()
        request.CopyFrom(self._messages[index])
        request.id, self._next_id = self._next_id, self._next_id + 1
        answered = asyncio.get_running_loop().create_future()
        self._open[request.id] = (builder, answered)
        self._unsent.append(request)
        self._has_unsent.set()
        if self._conversation is None or self._conversation.done():
            self._conversation = asyncio.create_task(self._converse())
        try:
            await answered
        finally:
            if self._open.pop(request.id, None) is not None:
                self._cancelled.append(request.id)
                self._has_unsent.set()

    async def close(self) -> None:
        """Cancel the call."""
        if self._conversation is not None:
            self._conversation.cancel()
            await asyncio.gather(self._conversation, return_exceptions=True)

    async def _converse(self) -> None:
        call: Call = self._stub.GenerateMany(metadata=self._call_options.arguments()["metadata"])
        writing = asyncio.create_task(self._write(call))
        try:
            async for response in call:
                now_s = time.monotonic()
                for answer in response.answers:
                    self._read(answer, now_s)
            self._end(early_end())
        except grpc.aio.AioRpcError as broken:
            self._end(end_of_call(broken))
        finally:
            writing.cancel()
            call.cancel()
            self._unsent.clear()

    def _end(self, error: ServerError) -> None:
        """Note that the call has ended without the answers of its open requests."""
        for builder, answered in self._open.values():
            builder.refused(Outcome(error.code.name, error.reason), error.message)
            if not answered.done():
                answered.set_result(None)

    async def _write(self, call: Call) -> None:
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            while True:
                await self._has_unsent.wait()
                self._has_unsent.clear()
                unsent, self._unsent = self._unsent, []
                cancelled, self._cancelled = self._cancelled, []
                for message in pack(unsent):
                    await call.write(message)
                if cancelled:
                    await call.write(pb.GenerateManyRequest(cancelled_ids=cancelled))

    def _read(self, answer: pb.ManyAnswer, now_s: float) -> None:
        if answer.id not in self._open:
            return
        builder, answered = self._open[answer.id]
        kind = answer.WhichOneof("content")
        if kind == "delta":
            builder.delta(answer.delta, now_s)
            is_last = answer.delta.HasField("usage")
        else:
            is_last = True
            if kind == "whole":
                builder.whole(answer.whole)
            else:
                builder.refused(_outcome_of_failure(answer.failure), answer.failure.message)
        if is_last and not answered.done():
            answered.set_result(None)
            del self._open[answer.id]


def _outcome_of_failure(failure: pb.Failure) -> Outcome:
    return Outcome(_CODES.get(failure.code, "UNKNOWN"), failure.reason or None, failure.HasField("retry_after"))
