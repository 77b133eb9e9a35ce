"""One request of the Open Inference Protocol: becomes requests of antiphon.v1, whose answers become tensors.

Each text of a batch is a separate request to the engine, which batches it with all running requests. Each task is an
RPC of antiphon.v1. The requested outputs select the task; without any, it is the model's first task.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from antiphon.domain.errors import InvalidArgument, Unsupported
from antiphon.domain.request import Task as EngineTask
from antiphon.oip import inference_pb2 as oip
from antiphon.rpc.context import RequestContext
from antiphon.rpc.oip.parameters import read_parameters
from antiphon.rpc.oip.tensors import Tensor, check_parameters, read_inputs, write_outputs
from antiphon.rpc.v1.models import LoadedModel
from antiphon.rpc.v1.servicer import InferenceServicer
from antiphon.v1 import inference_pb2 as pb

VERSION = "1"
MAX_BATCH = 256
MAX_TOKEN_ID = 2**32 - 1

Shape = tuple[int, ...]
Method = Callable[[InferenceServicer, Any, RequestContext], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Tensor as ModelMetadata describes it; -1 is any length."""

    name: str
    datatype: str
    shape: Shape


TEXT = TensorSpec("text_input", "BYTES", (-1,))
IDS = TensorSpec("input_ids", "INT64", (1, -1))
PAIR = TensorSpec("text_pair", "BYTES", (-1,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Task of a model."""

    kind: type[Message]
    """Request message of antiphon.v1."""
    method: Method
    """Method that answers it."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    answer: Callable[[Sequence[Any], Shape], list[Tensor]]
    """Converts the answers to a batch, given its shape, to the tensors of all `outputs` in order."""


def generated(answers: Sequence[pb.GenerateUnaryResponse], shape: Shape) -> list[Tensor]:
    """Return texts, token ids padded with 0 to the longest, numbers of tokens, and finish reasons."""
    outputs = [output for answer in answers for output in answer.outputs]
    num_each = len(answers[0].outputs)
    leading = shape if num_each == 1 else (len(answers), num_each)
    longest = max(len(output.token_ids) for output in outputs)
    ids = [token_id for output in outputs for token_id in (*output.token_ids, *[0] * (longest - len(output.token_ids)))]
    return [
        Tensor("text_output", "BYTES", leading, [output.text.encode() for output in outputs]),
        Tensor("output_ids", "INT32", (*leading, longest), ids),
        Tensor("sequence_length", "INT32", leading, [len(output.token_ids) for output in outputs]),
        Tensor("finish_reason", "BYTES", leading, [_reason(output.finish_reason) for output in outputs]),
    ]


def delta(response: pb.GenerateResponse, shape: Shape) -> list[Tensor]:
    """Return the tensors of one message of a stream, with its new text and tokens only."""
    output = pb.Output(text=response.text_delta, token_ids=response.token_ids, finish_reason=response.finish_reason)
    return generated([pb.GenerateUnaryResponse(outputs=[output])], shape)


def _classified(answers: Sequence[pb.ClassifyResponse], shape: Shape) -> list[Tensor]:
    entries = [entry for answer in answers for entry in answer.labels]
    full = (len(answers), len(answers[0].labels))
    return [
        Tensor("labels", "BYTES", full, [entry.label.encode() for entry in entries]),
        Tensor("scores", "FP32", full, [entry.score for entry in entries]),
    ]


def _embedded(answers: Sequence[pb.EmbedResponse], shape: Shape) -> list[Tensor]:
    widths = {len(answer.embedding) for answer in answers}
    if len(widths) > 1:
        raise InvalidArgument("parameters.pooling", "none", "another one for texts of different lengths")
    values = [value for answer in answers for value in answer.embedding]
    return [Tensor("embedding", "FP32", (len(answers), widths.pop()), values)]


def _tagged(answers: Sequence[pb.TagResponse], shape: Shape) -> list[Tensor]:
    parts = [pb.TagResponse(tokens=answer.tokens, spans=answer.spans) for answer in answers]
    return [Tensor("tags", "BYTES", shape, [_json(part) for part in parts])]


def _filled(answers: Sequence[pb.FillMaskResponse], shape: Shape) -> list[Tensor]:
    parts = [pb.FillMaskResponse(places=answer.places) for answer in answers]
    return [Tensor("fillings", "BYTES", shape, [_json(part) for part in parts])]


def _reason(reason: pb.FinishReason.ValueType) -> bytes:
    return pb.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower().encode() if reason else b""


def _json(message: Message) -> bytes:
    text = MessageToJson(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None
    )
    return text.encode()


GENERATE = Task(
    kind=pb.GenerateUnaryRequest,
    method=InferenceServicer.generate_unary,
    inputs=(TEXT, IDS),
    outputs=(
        TensorSpec("text_output", "BYTES", (-1,)),
        TensorSpec("output_ids", "INT32", (-1, -1)),
        TensorSpec("sequence_length", "INT32", (-1,)),
        TensorSpec("finish_reason", "BYTES", (-1,)),
    ),
    answer=generated,
)
STREAMED = dataclasses.replace(GENERATE, kind=pb.GenerateRequest, method=InferenceServicer.generate)
"""GENERATE with a streamed answer, whose messages `delta` converts to tensors."""
CLASSIFY = Task(
    kind=pb.ClassifyRequest,
    method=InferenceServicer.classify,
    inputs=(TEXT, IDS, PAIR),
    outputs=(TensorSpec("labels", "BYTES", (-1, -1)), TensorSpec("scores", "FP32", (-1, -1))),
    answer=_classified,
)
EMBED = Task(
    kind=pb.EmbedRequest,
    method=InferenceServicer.embed,
    inputs=(TEXT, IDS, PAIR),
    outputs=(TensorSpec("embedding", "FP32", (-1, -1)),),
    answer=_embedded,
)
TAG = Task(
    kind=pb.TagRequest,
    method=InferenceServicer.tag,
    inputs=(TEXT,),
    outputs=(TensorSpec("tags", "BYTES", (-1,)),),
    answer=_tagged,
)
FILL_MASK = Task(
    kind=pb.FillMaskRequest,
    method=InferenceServicer.fill_mask,
    inputs=(TEXT, IDS),
    outputs=(TensorSpec("fillings", "BYTES", (-1,)),),
    answer=_filled,
)
# Tasks of encoders. The first one that a model has is its default task.
_OF_ENCODERS: Mapping[pb.Task.ValueType, Task] = {
    pb.TASK_CLASSIFY: CLASSIFY,
    pb.TASK_TAG: TAG,
    pb.TASK_FILL_MASK: FILL_MASK,
    pb.TASK_NEXT_SENTENCE: CLASSIFY,
}


def is_encoder(model: LoadedModel) -> bool:
    """Return whether a model is encoder-only."""
    return model.description.architecture == pb.ARCHITECTURE_ENCODER


def tasks_of(model: LoadedModel) -> list[Task]:
    """Return the tasks of a model, its default task first."""
    tasks = [] if is_encoder(model) else [GENERATE]
    described = {entry.task for entry in model.description.tasks}
    for kind, task in _OF_ENCODERS.items():
        if kind in described and task not in tasks:
            tasks.append(task)
    try:
        model.engine.check_ability(EngineTask.EMBED)
    except Unsupported:
        return tasks
    return [*tasks, EMBED]


def find_task(model: LoadedModel, output_names: Sequence[str]) -> Task:
    """Return the task with the named outputs; the model's default task if none are named. Raises InvalidArgument."""
    tasks = tasks_of(model)
    if not output_names:
        return tasks[0]
    for task in tasks:
        if {output.name for output in task.outputs}.issuperset(output_names):
            return task
    sets = " or of ".join(", ".join(output.name for output in task.outputs) for task in tasks)
    raise InvalidArgument("outputs", list(output_names)[:8], f"of {sets}")


def tensors_of(model: LoadedModel) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Return all input tensors and all output tensors of a model."""
    tasks = tasks_of(model)
    inputs = {tensor.name: tensor for task in tasks for tensor in task.inputs}
    outputs = {tensor.name: tensor for task in tasks for tensor in task.outputs}
    return list(inputs.values()), list(outputs.values())


_A = TypeVar("_A")
# Fields of antiphon.v1 that come from tensors; all others come from parameters.
_TENSORS = {"text": TEXT.name, "token_ids": IDS.name, "text_pair": PAIR.name}


@dataclass(frozen=True, kw_only=True, slots=True)
class Inference:
    """Request that was read."""

    model: LoadedModel
    task: Task
    messages: tuple[Any, ...]
    """Requests of antiphon.v1, one per text."""
    shape: Shape
    """Shape of the tensor with the texts."""
    output_names: tuple[str, ...]
    """Names of the outputs to return, in order."""
    request_id: str
    timeout_s: float | None
    """Time limit of the request; None is the call's only."""

    async def answers(self, context: RequestContext) -> list[Any]:
        """Return the answers of antiphon.v1 in the order of the texts. The first error cancels the others."""
        limited = context.derive(timeout_s=self.timeout_s)
        return await together([self._answer(index, limited) for index in range(len(self.messages))])

    def response(self, tensors: Sequence[Tensor], usages: Sequence[pb.Usage]) -> oip.ModelInferResponse:
        """Return a response with the requested tensors of the task, and with token counts if there are any usages."""
        response = oip.ModelInferResponse(model_name=self.model.name, model_version=VERSION, id=self.request_id)
        by_name = {tensor.name: tensor for tensor in tensors}
        write_outputs(response, [by_name[name] for name in self.output_names])
        if usages:
            response.parameters["source_tokens"].int64_param = sum(usage.source_tokens for usage in usages)
            response.parameters["generated_tokens"].int64_param = sum(usage.generated_tokens for usage in usages)
        return response

    async def _answer(self, index: int, context: RequestContext) -> Any:
        try:
            return await self.task.method(self.model.servicer, self.messages[index], context)
        except InvalidArgument as error:
            raise self.with_client_field(error, index) from None

    def with_client_field(self, error: InvalidArgument, index: int = 0) -> InvalidArgument:
        """Return an error of antiphon.v1 with the name of the client's field."""
        field = _TENSORS.get(error.field)
        if field is None:
            return InvalidArgument(f"parameters.{error.field.removeprefix('options.')}", error.value, error.allowed)
        return InvalidArgument(f"{field}[{index}]" if len(self.messages) > 1 else field, error.value, error.allowed)


def read_inference(message: oip.ModelInferRequest, model: LoadedModel, *, is_streamed: bool) -> Inference:
    """Read a request to a model. Raises InvalidArgument naming the tensor or parameter, or Unsupported.

    is_streamed: stream a generated answer.
    """
    for output in message.outputs:
        check_parameters(output)
    output_names = tuple(output.name for output in message.outputs)
    task = find_task(model, output_names)
    if is_streamed and task is GENERATE:
        task = STREAMED
    parameters = read_parameters(task.kind, message.parameters)
    sources, shape = _sources(task, read_inputs(message))
    messages = []
    for source in sources:
        request = type(parameters.message)(model=model.name, **source)
        request.MergeFrom(parameters.message)
        messages.append(request)
    return Inference(
        model=model,
        task=task,
        messages=tuple(messages),
        shape=shape,
        output_names=output_names or tuple(output.name for output in task.outputs),
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
    input_names = [tensor.name for tensor in task.inputs]
    for name in tensors:
        if name not in input_names:
            raise InvalidArgument("inputs", [name[:64]], f"of {', '.join(input_names)}")
    if (TEXT.name in tensors) == (IDS.name in tensors):
        either = TEXT.name if IDS.name not in input_names else f"either {TEXT.name} or {IDS.name}"
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
