"""A server with scripted answers that records its requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from antiphon.v1 import inference_pb2 as pb

Context = grpc.aio.ServicerContext[Any, Any]
Asked = pb.GenerateRequest | pb.GenerateUnaryRequest


async def at_once(request: Asked) -> list[pb.GenerateResponse]:
    """Stream the words of the source one by one; the last message ends the output."""
    words = request.text.split()
    answer = [pb.GenerateResponse(text_delta=f"{word} ") for word in words]
    end = pb.GenerateResponse(finish_reason=pb.FINISH_REASON_STOP, usage=pb.Usage(generated_tokens=len(words) + 1))
    return [*answer, end]


class Scripted:
    """Servicer with scripted answers.

    answer: called for each request. asked: every request, with its peer and its deadline.
    refusal: status of every call instead of an answer.
    """

    def __init__(
        self,
        answer: Callable[[Asked], Awaitable[list[pb.GenerateResponse]]] = at_once,
        *,
        refusal: grpc.StatusCode | None = None,
    ) -> None:
        self._answer = answer
        self._refusal = refusal
        self.asked: list[tuple[Asked, str, float | None]] = []
        self.first_asked = asyncio.Event()
        self.model = pb.Model(name="scripted")

    async def generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        for message in await self._take(request, context):
            yield message

    async def generate_unary(self, request: pb.GenerateUnaryRequest, context: Context) -> pb.GenerateUnaryResponse:
        return _whole(await self._take(request, context))

    async def generate_many(
        self, messages: AsyncIterator[pb.GenerateManyRequest], context: Context
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        async for message in messages:
            for one in message.requests:
                self.asked.append((one.request, context.peer(), one.timeout_millis / 1000))
                self.first_asked.set()
                yield pb.GenerateManyResponse(answers=[answer async for answer in self._among_many(one)])

    async def _among_many(self, one: pb.ManyRequest) -> AsyncIterator[pb.ManyAnswer]:
        if self._refusal is not None:
            failure = pb.Failure(code=self._refusal.value[0], message="not now")
            yield pb.ManyAnswer(id=one.id, failure=failure)
            return
        messages = await self._answer(one.request)
        if one.is_whole:
            yield pb.ManyAnswer(id=one.id, whole=_whole(messages))
            return
        for message in messages:
            yield pb.ManyAnswer(id=one.id, delta=message)

    async def get_model(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        return pb.GetModelResponse(model=self.model)

    def handler(self) -> grpc.GenericRpcHandler:
        """Return its methods under the names of the contract."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.generate, pb.GenerateRequest.FromString, pb.GenerateResponse.SerializeToString
            ),
            "GenerateUnary": grpc.unary_unary_rpc_method_handler(
                self.generate_unary, pb.GenerateUnaryRequest.FromString, pb.GenerateUnaryResponse.SerializeToString
            ),
            "GenerateMany": grpc.stream_stream_rpc_method_handler(
                self.generate_many, pb.GenerateManyRequest.FromString, pb.GenerateManyResponse.SerializeToString
            ),
            "GetModel": grpc.unary_unary_rpc_method_handler(
                self.get_model, pb.GetModelRequest.FromString, pb.GetModelResponse.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler("antiphon.v1.InferenceService", methods)

    async def _take(self, request: Asked, context: Context) -> list[pb.GenerateResponse]:
        self.asked.append((request, context.peer(), context.time_remaining()))
        self.first_asked.set()
        if self._refusal is not None:
            await context.abort(self._refusal, "not now")
        return await self._answer(request)


def _whole(messages: list[pb.GenerateResponse]) -> pb.GenerateUnaryResponse:
    text = "".join(message.text_delta for message in messages)
    return pb.GenerateUnaryResponse(outputs=[pb.Output(text=text)], usage=messages[-1].usage)


@contextlib.asynccontextmanager
async def served(scripted: Scripted) -> AsyncIterator[str]:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((scripted.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
