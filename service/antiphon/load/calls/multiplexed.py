"""Requests of a connection that share a GenerateMany call. Never sends one again: every refusal is counted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from antiphon.client.many import early_end, pack
from antiphon.client.many_tasks import end_of_call
from antiphon.client.messages import ServerError
from antiphon.client.options import CallOptions
from antiphon.load.calls.reading import Reading
from antiphon.load.calls.record import Outcome
from antiphon.load.plan import Plan
from antiphon.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from antiphon.v1.inference_pb2_grpc import InferenceServiceAsyncStub

Call = grpc.aio.StreamStreamCall[pb.GenerateManyRequest, pb.GenerateManyResponse]

_CODES = {code.value[0]: code.name for code in grpc.StatusCode}


class Multiplexed:
    """One call for all requests of a connection. It is opened with a request, and again after it has ended.

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
        self._open: dict[int, tuple[Reading, asyncio.Future[None]]] = {}
        self._next_id = 0
        self._unsent: list[pb.ManyRequest] = []
        self._cancelled: list[int] = []
        self._has_unsent = asyncio.Event()
        self._talk: asyncio.Task[None] | None = None

    async def ask(self, index: int, reading: Reading) -> None:
        """Send a request and read its answers."""
        request = pb.ManyRequest()
        request.CopyFrom(self._messages[index])
        request.id, self._next_id = self._next_id, self._next_id + 1
        answered = asyncio.get_running_loop().create_future()
        self._open[request.id] = (reading, answered)
        self._unsent.append(request)
        self._has_unsent.set()
        if self._talk is None or self._talk.done():
            self._talk = asyncio.create_task(self._converse())
        try:
            await answered
        finally:
            if self._open.pop(request.id, None) is not None:
                self._cancelled.append(request.id)
                self._has_unsent.set()

    async def close(self) -> None:
        """Cancel the call."""
        if self._talk is not None:
            self._talk.cancel()
            await asyncio.gather(self._talk, return_exceptions=True)

    async def _converse(self) -> None:
        call: Call = self._stub.GenerateMany(metadata=self._call_options.arguments()["metadata"])
        writing = asyncio.create_task(self._write(call))
        try:
            async for response in call:
                now_s = time.monotonic()
                for answer in response.answers:
                    self._take(answer, now_s)
            self._end(early_end())
        except grpc.aio.AioRpcError as broken:
            self._end(end_of_call(broken))
        finally:
            writing.cancel()
            call.cancel()
            self._unsent.clear()

    def _end(self, error: ServerError) -> None:
        """Note that the call has ended without the answers of its open requests."""
        for reading, answered in self._open.values():
            reading.refused(Outcome(error.code.name, error.reason), error.message)
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

    def _take(self, answer: pb.ManyAnswer, now_s: float) -> None:
        if answer.id not in self._open:
            return
        reading, answered = self._open[answer.id]
        kind = answer.WhichOneof("content")
        if kind == "delta":
            reading.delta(answer.delta, now_s)
            is_last = answer.delta.HasField("usage")
        else:
            is_last = True
            if kind == "whole":
                reading.whole(answer.whole)
            else:
                reading.refused(_outcome(answer.failure), answer.failure.message)
        if is_last and not answered.done():
            answered.set_result(None)
            del self._open[answer.id]


def _outcome(failure: pb.Failure) -> Outcome:
    return Outcome(_CODES.get(failure.code, "UNKNOWN"), failure.reason or None, failure.HasField("retry_after"))
