"""Table of the tasks of the Open Inference Protocol: input tensors, output tensors and the RPC that answers.

Each task is an RPC of antiphon.v1. Tensors and parameters become its request, and its answers become tensors. The
requested outputs select the task; without any, it is the model's first task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message

from antiphon.domain.errors import InvalidArgument, Unsupported
from antiphon.domain.request import Task as EngineTask
from antiphon.observability.telemetry import Context
from antiphon.rpc.oip.tensors import Tensor
from antiphon.rpc.v1.models import Served
from antiphon.rpc.v1.servicer import InferenceServicer
from antiphon.v1 import inference_pb2 as pb

Shape = tuple[int, ...]
Method = Callable[[InferenceServicer, Any, Context], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Described:
    """Tensor as ModelMetadata describes it; -1 is any length."""

    name: str
    datatype: str
    shape: Shape


TEXT = Described("text_input", "BYTES", (-1,))
IDS = Described("input_ids", "INT64", (1, -1))
PAIR = Described("text_pair", "BYTES", (-1,))


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Task of a model.

    kind: request message of antiphon.v1. method: method that answers it.
    answer: converts the answers to a batch, given its shape, to the tensors of all `outputs` in order.
    """

    kind: type[Message]
    method: Method
    inputs: tuple[Described, ...]
    outputs: tuple[Described, ...]
    answer: Callable[[Sequence[Any], Shape], list[Tensor]]


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
        Described("text_output", "BYTES", (-1,)),
        Described("output_ids", "INT32", (-1, -1)),
        Described("sequence_length", "INT32", (-1,)),
        Described("finish_reason", "BYTES", (-1,)),
    ),
    answer=generated,
)
STREAMED = dataclasses.replace(GENERATE, kind=pb.GenerateRequest, method=InferenceServicer.generate)
"""GENERATE with a streamed answer, whose messages `delta` converts to tensors."""
CLASSIFY = Task(
    kind=pb.ClassifyRequest,
    method=InferenceServicer.classify,
    inputs=(TEXT, IDS, PAIR),
    outputs=(Described("labels", "BYTES", (-1, -1)), Described("scores", "FP32", (-1, -1))),
    answer=_classified,
)
EMBED = Task(
    kind=pb.EmbedRequest,
    method=InferenceServicer.embed,
    inputs=(TEXT, IDS, PAIR),
    outputs=(Described("embedding", "FP32", (-1, -1)),),
    answer=_embedded,
)
TAG = Task(
    kind=pb.TagRequest,
    method=InferenceServicer.tag,
    inputs=(TEXT,),
    outputs=(Described("tags", "BYTES", (-1,)),),
    answer=_tagged,
)
FILL_MASK = Task(
    kind=pb.FillMaskRequest,
    method=InferenceServicer.fill_mask,
    inputs=(TEXT, IDS),
    outputs=(Described("fillings", "BYTES", (-1,)),),
    answer=_filled,
)
# Tasks of encoders. The first one that a model has is its default task.
_OF_ENCODERS: Mapping[pb.Task.ValueType, Task] = {
    pb.TASK_CLASSIFY: CLASSIFY,
    pb.TASK_TAG: TAG,
    pb.TASK_FILL_MASK: FILL_MASK,
    pb.TASK_NEXT_SENTENCE: CLASSIFY,
}


def is_encoder(served: Served) -> bool:
    """Return whether a model is encoder-only."""
    return served.description.architecture == pb.ARCHITECTURE_ENCODER


def tasks_of(served: Served) -> list[Task]:
    """Return the tasks of a model, its default task first."""
    tasks = [] if is_encoder(served) else [GENERATE]
    described = {entry.task for entry in served.description.tasks}
    for known, task in _OF_ENCODERS.items():
        if known in described and task not in tasks:
            tasks.append(task)
    try:
        served.engine.check_ability(EngineTask.EMBED)
    except Unsupported:
        return tasks
    return [*tasks, EMBED]


def find_task(served: Served, wanted: Sequence[str]) -> Task:
    """Return the task with the wanted outputs; the model's default task if none are named. Raises InvalidArgument."""
    tasks = tasks_of(served)
    if not wanted:
        return tasks[0]
    for task in tasks:
        if {output.name for output in task.outputs}.issuperset(wanted):
            return task
    sets = " or of ".join(", ".join(output.name for output in task.outputs) for task in tasks)
    raise InvalidArgument("outputs", list(wanted)[:8], f"of {sets}")


def tensors_of(served: Served) -> tuple[list[Described], list[Described]]:
    """Return all input tensors and all output tensors of a model."""
    tasks = tasks_of(served)
    inputs = {tensor.name: tensor for task in tasks for tensor in task.inputs}
    outputs = {tensor.name: tensor for task in tasks for tensor in task.outputs}
    return list(inputs.values()), list(outputs.values())
