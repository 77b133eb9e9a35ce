"""ModelStreamInfer: answers the requests of a stream concurrently. Each response has the id of its request.

A model that generates sends one response per delta. An encoder sends one response per request, in the order of the
requests. The last response of every request is marked with triton_final_response, including that of an error.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from antiphon.domain.errors import AntiphonError, InvalidArgument, SlowReader
from antiphon.oip import inference_pb2 as oip
from antiphon.rpc.context import RequestContext
from antiphon.rpc.middleware import CallMiddleware
from antiphon.rpc.oip.answering import Answering
from antiphon.rpc.oip.inference import STREAMED, VERSION, Inference, delta, is_encoder
from antiphon.v1 import inference_pb2 as pb

# Maximum number of concurrent requests of one call. Further ones stay unread: flow control makes the client wait.
MAX_OPEN_REQUESTS = 256
# Triton's header: with it, the first error ends the call and becomes its status.
ERROR_HEADER = ("triton_grpc_error", "true")


class Conversation:
    """One call and its requests. name: method name in the metrics and the log of each request."""

    def __init__(self, name: str, answering: Answering, middleware: CallMiddleware, context: RequestContext) -> None:
        self._name = name
        self._answering = answering
        self._middleware = middleware
        self._writer = context.writer(lambda: self._open_bytes)
        self._open_bytes = 0  # memory of the open requests, and of answers behind the one that is being written
        self._context = context
        self._writing = asyncio.Lock()  # gRPC accepts one message of a call at a time
        self._ends_on_error = ERROR_HEADER in context.metadata

    async def run(self, requests: AsyncIterator[oip.ModelInferRequest]) -> None:
        """Answer every request. Returns when the client has ended its side and all requests are answered."""
        slots = asyncio.Semaphore(MAX_OPEN_REQUESTS)
        before: asyncio.Task[None] | None = None
        try:
            async with asyncio.TaskGroup() as group:
                async for request in requests:
                    await slots.acquire()
                    before = group.create_task(self._account(request, before))
                    before.add_done_callback(lambda _: slots.release())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _account(self, request: oip.ModelInferRequest, before: asyncio.Task[None] | None) -> None:
        """Answer one request, with metrics and a log line. Raises an error only if it must end the call."""
        with self._middleware.request(self._name, self._context) as context, self._keeping(request.ByteSize()):
            record = context.record
            record.code = "CANCELLED"  # replaced if the request ends
            try:
                await self._answer(request, before, context)
                record.code = "OK"
            except AntiphonError as error:
                record.code = error.status.name
                if self._ends_on_error or isinstance(error, SlowReader):  # a slow reader would not read the error
                    raise
                record.error = error
                failed = oip.ModelInferResponse(id=request.id, model_name=request.model_name, model_version=VERSION)
                message = oip.ModelStreamInferResponse(error_message=str(error), infer_response=failed)
                await self._write(_serialized(message, is_last=True))

    async def _answer(
        self, request: oip.ModelInferRequest, before: asyncio.Task[None] | None, context: RequestContext
    ) -> None:
        is_ordered = is_encoder(self._answering.find(request.model_name, request.model_version))
        data = b""
        try:
            inference = self._answering.read(request, context, is_streamed=True)
            if inference.task is STREAMED:
                await self._generate(inference, context)
                return
            data = _serialized(
                oip.ModelStreamInferResponse(infer_response=await self._answering.infer(inference, context)),
                is_last=True,
            )
        finally:
            if is_ordered and before is not None:
                with self._keeping(len(data)):
                    await asyncio.wait({before})
        await self._write(data)

    async def _generate(self, inference: Inference, context: RequestContext) -> None:
        with self._answering.counting(inference.model) as timings:

            async def write(data: bytes) -> None:
                message = pb.GenerateResponse.FromString(data)
                is_last = message.HasField("usage")
                if is_last:
                    timings.append(message.timing)
                response = inference.response(delta(message, inference.shape), [message.usage] if is_last else [])
                response.parameters["output_index"].int64_param = message.output_index
                data = _serialized(oip.ModelStreamInferResponse(infer_response=response), is_last=is_last)
                del message, response  # the client may not read, and their objects take several times the memory
                await self._write(data)

            streamed = context.derive(timeout_s=inference.timeout_s, send=write)
            try:
                await inference.task.method(inference.model.servicer, inference.messages[0], streamed)
            except InvalidArgument as error:
                raise inference.with_client_field(error) from None

    @contextlib.contextmanager
    def _keeping(self, num_bytes: int) -> Iterator[None]:
        """Count memory that the call takes until the context exits."""
        self._open_bytes += num_bytes
        try:
            yield
        finally:
            self._open_bytes -= num_bytes

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            await self._writer.write_to_the_end(data)


def _serialized(response: oip.ModelStreamInferResponse, *, is_last: bool) -> bytes:
    response.infer_response.parameters["triton_final_response"].bool_param = is_last
    return response.SerializeToString()
