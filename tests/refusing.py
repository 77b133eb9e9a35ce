"""Real gRPC server with scripted answers that records its requests, for tests of refusals in clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from antiphon.v1 import inference_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]
Answer = Callable[[int, Context], Awaitable[None]]


class Recorded:
    """Generate and GenerateUnary; `answer(n, context)` runs first in the n-th attempt, from 1, and may abort it."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.requests: list[Any] = []
        self.metadata: list[Mapping[str, str | bytes]] = []
        self.remaining_s: list[float | None] = []

    @property
    def num_attempts(self) -> int:
        return len(self.requests)

    async def _record(self, request: Any, context: Context) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.remaining_s.append(context.time_remaining())
        await self._answer(len(self.requests), context)

    async def _generate_unary(self, request: Any, context: Context) -> pb.GenerateUnaryResponse:
        await self._record(request, context)
        return pb.GenerateUnaryResponse(outputs=[pb.Output(text="whole", finish_reason=pb.FINISH_REASON_STOP)])

    async def _generate(self, request: Any, context: Context) -> None:
        await self._record(request, context)
        await context.write(pb.GenerateResponse(text_delta="whole", finish_reason=pb.FINISH_REASON_STOP))

    def handler(self) -> grpc.GenericRpcHandler:
        """Return handlers for `add_generic_rpc_handlers`."""
        return grpc.method_handlers_generic_handler(
            "antiphon.v1.InferenceService",
            {
                "GenerateUnary": grpc.unary_unary_rpc_method_handler(
                    self._generate_unary, pb.GenerateUnaryRequest.FromString, pb.GenerateUnaryResponse.SerializeToString
                ),
                "Generate": grpc.unary_stream_rpc_method_handler(
                    self._generate, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
                ),
            },
        )


def refuse(
    num_times: int,
    code: grpc.StatusCode = grpc.StatusCode.RESOURCE_EXHAUSTED,
    *,
    metadata: tuple[tuple[str, str], ...] = (),
) -> Answer:
    """Refuse the first attempts."""

    async def answer(attempt: int, context: Context) -> None:
        if attempt <= num_times:
            await context.abort(code, "not now", metadata)

    return answer


async def welcome(attempt: int, context: Context) -> None:
    """Refuse nothing."""


@contextlib.asynccontextmanager
async def hosting(handler: grpc.GenericRpcHandler) -> AsyncIterator[str]:
    """Serve handlers on a free port; yield the target."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await asyncio.shield(server.stop(None))


@contextlib.asynccontextmanager
async def recording(answer: Answer = welcome) -> AsyncIterator[tuple[str, Recorded]]:
    """Serve on a free port; yield the target and the recorded requests."""
    servicer = Recorded(answer)
    async with hosting(servicer.handler()) as target:
        yield target, servicer
