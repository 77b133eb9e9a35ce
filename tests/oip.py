"""Requests of the Open Inference Protocol as its clients build them, and readers of the answers."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from antiphon.oip import inference_pb2 as pb
from antiphon.oip.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.serving import Serving

_NUMPY = {"INT32": "<i4", "INT64": "<i8", "UINT32": "<u4", "FP32": "<f4"}
_TYPED = {"INT32": "int_contents", "INT64": "int64_contents", "UINT32": "uint_contents", "BYTES": "bytes_contents"}


def oip_stub(served: Serving) -> Any:
    return GRPCInferenceServiceStub(served.channel)


def raw(datatype: str, values: Sequence[Any]) -> bytes:
    """Encode elements as in raw_input_contents."""
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value)) + value for value in values)
    return np.asarray(values, _NUMPY[datatype]).tobytes()


def infer_request(
    inputs: Mapping[str, tuple[str, Sequence[int], Sequence[Any]]],
    outputs: Sequence[str] = (),
    *,
    is_typed: bool = False,
    parameters: Mapping[str, Any] | None = None,
    **fields: Any,
) -> pb.ModelInferRequest:
    """Build a request. inputs: datatype, shape and elements by name. is_typed: elements in `contents` and not raw."""
    request = pb.ModelInferRequest(**fields)
    for name, (datatype, shape, values) in inputs.items():
        tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
        if is_typed:
            getattr(tensor.contents, _TYPED[datatype]).extend(values)
        else:
            request.raw_input_contents.append(raw(datatype, values))
    for name in outputs:
        request.outputs.add(name=name)
    for name, value in (parameters or {}).items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


def ids_request(ids: Sequence[int], **fields: Any) -> pb.ModelInferRequest:
    """Build a request of one source as token ids."""
    return infer_request({"input_ids": ("INT64", (1, len(ids)), ids)}, **fields)


def text_request(*texts: str, **fields: Any) -> pb.ModelInferRequest:
    """Build a request of a batch of texts."""
    return infer_request({"text_input": ("BYTES", (len(texts),), [text.encode() for text in texts])}, **fields)


def tensors(response: pb.ModelInferResponse) -> dict[str, Any]:
    """Return the outputs by name, nested by their shapes; texts as str."""
    found: dict[str, Any] = {}
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        assert not output.HasField("contents")
        found[output.name] = _array(output.datatype, content).reshape(tuple(output.shape)).tolist()
    return found


def _array(datatype: str, content: bytes) -> Any:
    if datatype != "BYTES":
        return np.frombuffer(content, _NUMPY[datatype])
    texts = []
    while content:
        (length,) = struct.unpack_from("<I", content)
        texts.append(content[4 : 4 + length].decode())
        content = content[4 + length :]
    return np.array(texts, dtype=object)


def num_cancelled(served: Serving) -> float:
    """Wait until the server is idle; return the number of requests whose client had left, from the metrics."""
    return sum(
        sample.value
        for metric in served.registry.collect()
        for sample in metric.samples
        if sample.name == "antiphon_cancellations_total" and sample.labels.get("cause") == "client"
    )
