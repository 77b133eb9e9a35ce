"""One request of the Open Inference Protocol: becomes requests of antiphon.v1, whose answers become tensors.

Each text of a batch is a separate request to the engine, which batches it with all running requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from antiphon.domain.errors import InvalidArgument
from antiphon.observability.telemetry import Context
from antiphon.oip import inference_pb2 as oip
from antiphon.rpc.grpc_fixes.deadline import TimeLimited, remaining_s
from antiphon.rpc.oip.parameters import read_parameters
from antiphon.rpc.oip.tasks import GENERATE, IDS, PAIR, STREAMED, TEXT, Shape, Task, find_task
from antiphon.rpc.oip.tensors import Tensor, check_parameters, read_inputs, write_outputs
from antiphon.rpc.status import Metadata
from antiphon.rpc.v1.models import Served
from antiphon.v1 import inference_pb2 as pb

VERSION = "1"
MAX_BATCH = 256
MAX_TOKEN_ID = 2**32 - 1

_A = TypeVar("_A")
# Fields of antiphon.v1 that come from tensors; all others come from parameters.
_TENSORS = {"text": TEXT.name, "token_ids": IDS.name, "text_pair": PAIR.name}


@dataclass(frozen=True, kw_only=True, slots=True)
class Inference:
    """Request that was read.

    messages: requests of antiphon.v1, one per text. shape: shape of the tensor with the texts.
    wanted: names of the outputs to return, in order. timeout_s: time limit of the request; None is the call's only.
    """

    served: Served
    task: Task
    messages: tuple[Any, ...]
    shape: Shape
    wanted: tuple[str, ...]
    request_id: str
    timeout_s: float | None

    async def answers(self, context: Context) -> list[Any]:
        """Return the answers of antiphon.v1 in the order of the texts. The first error cancels the others."""
        request_context = RequestContext(context, self.timeout_s)
        return await together([self._answer(index, request_context) for index in range(len(self.messages))])

    def response(self, tensors: Sequence[Tensor], usages: Sequence[pb.Usage]) -> oip.ModelInferResponse:
        """Return a response with the wanted tensors of the task, and with token counts if there are any usages."""
        response = oip.ModelInferResponse(model_name=self.served.name, model_version=VERSION, id=self.request_id)
        found = {tensor.name: tensor for tensor in tensors}
        write_outputs(response, [found[name] for name in self.wanted])
        if usages:
            response.parameters["source_tokens"].int64_param = sum(usage.source_tokens for usage in usages)
            response.parameters["generated_tokens"].int64_param = sum(usage.generated_tokens for usage in usages)
        return response

    async def _answer(self, index: int, context: RequestContext) -> Any:
        try:
            return await self.task.method(self.served.servicer, self.messages[index], cast("Context", context))
        except InvalidArgument as error:
            raise self.with_client_field(error, index) from None

    def with_client_field(self, error: InvalidArgument, index: int = 0) -> InvalidArgument:
        """Return an error of antiphon.v1 with the name of the client's field."""
        field = _TENSORS.get(error.field)
        if field is None:
            return InvalidArgument(f"parameters.{error.field.removeprefix('options.')}", error.value, error.allowed)
        return InvalidArgument(f"{field}[{index}]" if len(self.messages) > 1 else field, error.value, error.allowed)


class RequestContext(TimeLimited):
    """Context of one request of a call: with its own time limit and, if its answer is streamed, its own writer.

    Everything else comes from the call's context.
    """

    def __init__(
        self, context: Context, timeout_s: float | None, write: Callable[[Any], Awaitable[None]] | None = None
    ) -> None:
        self._context = context
        self._timeout_s = timeout_s
        if write is not None:
            self.write = write

    def remaining_s(self) -> float | None:
        """Return the seconds left: those of the call or those of the request, whichever are fewer."""
        limits = [limit for limit in (remaining_s(self._context), self._timeout_s) if limit is not None]
        return min(limits, default=None)

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        """Do nothing: the writer of the call's first message sends its headers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def read_inference(message: oip.ModelInferRequest, served: Served, *, is_streamed: bool) -> Inference:
    """Read a request to a model. Raises InvalidArgument naming the tensor or parameter, or Unsupported.

    is_streamed: stream a generated answer.
    """
    for output in message.outputs:
        check_parameters(output)
    wanted = tuple(output.name for output in message.outputs)
    task = find_task(served, wanted)
    if is_streamed and task is GENERATE:
        task = STREAMED
    parameters = read_parameters(task.kind, message.parameters)
    sources, shape = _sources(task, read_inputs(message))
    messages = []
    for source in sources:
        request = type(parameters.message)(model=served.name, **source)
        request.MergeFrom(parameters.message)
        messages.append(request)
    return Inference(
        served=served,
        task=task,
        messages=tuple(messages),
        shape=shape,
        wanted=wanted or tuple(output.name for output in task.outputs),
        request_id=message.id,
        timeout_s=parameters.timeout_s,
    )


async def together(calls: Sequence[Coroutine[Any, Any, _A]]) -> list[_A]:
    """Run calls concurrently and return their results in order. Cancels the others at the first error and raises it."""
    if len(calls) == 1:
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _sources(task: Task, tensors: dict[str, Tensor]) -> tuple[list[dict[str, Any]], Shape]:
    """Return the source fields of each request of a batch, and the shape of the batch."""
    known = [tensor.name for tensor in task.inputs]
    for name in tensors:
        if name not in known:
            raise InvalidArgument("inputs", [name[:64]], f"of {', '.join(known)}")
    if (TEXT.name in tensors) == (IDS.name in tensors):
        either = TEXT.name if IDS.name not in known else f"either {TEXT.name} or {IDS.name}"
        raise InvalidArgument("inputs", list(tensors), either)
    if IDS.name in tensors:
        if PAIR.name in tensors:
            raise InvalidArgument(PAIR.name, "given", f"given only beside {TEXT.name}")
        return [{"token_ids": pb.TokenIds(ids=_token_ids(tensors[IDS.name]))}], (1,)
    texts = _texts(tensors[TEXT.name])
    sources: list[dict[str, Any]] = [{"text": text} for text in texts]
    if PAIR.name in tensors:
        pairs = _texts(tensors[PAIR.name])
        if len(pairs) != len(texts):
            raise InvalidArgument(PAIR.name, f"{len(pairs)} texts", f"as many as {TEXT.name} has, {len(texts)}")
        for source, pair in zip(sources, pairs, strict=True):
            source["text_pair"] = pair
    return sources, tensors[TEXT.name].shape


def _texts(tensor: Tensor) -> list[str]:
    if tensor.datatype != "BYTES":
        raise InvalidArgument(f"{tensor.name}.datatype", tensor.datatype, "BYTES")
    is_list = len(tensor.shape) in (1, 2) and tensor.shape[1:] in ((), (1,))
    if not is_list or not 1 <= len(tensor.values) <= MAX_BATCH:
        raise InvalidArgument(f"{tensor.name}.shape", list(tensor.shape), f"[n] or [n, 1], n from 1 to {MAX_BATCH}")
    try:
        return [bytes(value).decode() for value in tensor.values]
    except UnicodeDecodeError as error:
        raise InvalidArgument(tensor.name, error.object, "valid UTF-8") from None


def _token_ids(tensor: Tensor) -> Sequence[int]:
    if tensor.datatype not in ("INT32", "INT64", "UINT32"):
        raise InvalidArgument(f"{tensor.name}.datatype", tensor.datatype, "INT32, INT64 or UINT32")
    if len(tensor.shape) not in (1, 2) or tensor.shape[:-1] not in ((), (1,)):
        raise InvalidArgument(f"{tensor.name}.shape", list(tensor.shape), "[1, S] or [S]: one source")
    wrong = [value for value in tensor.values if not 0 <= value <= MAX_TOKEN_ID]
    if wrong:
        raise InvalidArgument(tensor.name, wrong[0], "of token ids of 0 or more")
    return tensor.values
