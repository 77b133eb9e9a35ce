"""Reads tensors of the Open Inference Protocol from requests, and writes them into responses.

Elements are either raw (little endian, row by row, each BYTES element after its length in 4 bytes) or typed. Requests
may use both forms; responses are raw, as Triton's are.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from antiphon.domain.errors import InvalidArgument, InWords, Unsupported
from antiphon.oip import inference_pb2 as pb

# Numeric datatypes: their numpy type, little endian on every machine, and the field of typed elements.
_NUMBERS = {
    "BOOL": ("?", "bool_contents"),
    "INT32": ("<i4", "int_contents"),
    "INT64": ("<i8", "int64_contents"),
    "UINT32": ("<u4", "uint_contents"),
    "UINT64": ("<u8", "uint64_contents"),
    "FP32": ("<f4", "fp32_contents"),
    "FP64": ("<f8", "fp64_contents"),
}
_LENGTH = struct.Struct("<I")
_MAX_RANK = 8


@dataclass(frozen=True, slots=True)
class Tensor:
    """Named tensor. values: bytes for BYTES, otherwise numbers, row by row; their number agrees with the shape."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: Sequence[Any]


def read_inputs(message: pb.ModelInferRequest) -> dict[str, Tensor]:
    """Return a request's tensors by name. Raises InvalidArgument naming the tensor, Unsupported for shared memory."""
    raws = message.raw_input_contents
    if raws and len(raws) != len(message.inputs):
        raise InvalidArgument(
            "raw_input_contents", f"{len(raws)} long", f"one for each of {len(message.inputs)} inputs"
        )
    tensors: dict[str, Tensor] = {}
    for index, tensor in enumerate(message.inputs):
        if tensor.name in tensors:
            raise InvalidArgument("inputs", [tensor.name[:64]] * 2, "of different names")
        tensors[tensor.name] = _read(tensor, raws[index] if raws else None)
    return tensors


def write_outputs(response: pb.ModelInferResponse, tensors: Sequence[Tensor]) -> None:
    """Append tensors to a response as raw elements."""
    for tensor in tensors:
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.append(_packed(tensor))


_TensorMessage = pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor


def check_parameters(tensor: _TensorMessage) -> None:
    """Raise Unsupported for shared memory and classification. Ignores other parameters that clients add, as sizes."""
    for name in tensor.parameters:
        if name.startswith("shared_memory") or name == "classification":
            raise Unsupported(f"{tensor.name}: {name} is not supported; send and request plain elements")


def _read(tensor: pb.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Tensor:
    check_parameters(tensor)
    shape = tuple(tensor.shape)
    if len(shape) > _MAX_RANK or any(length < 0 for length in shape):
        raise InvalidArgument(f"{tensor.name}.shape", list(shape[:16]), f"at most {_MAX_RANK} lengths of 0 or more")
    if raw is not None and tensor.HasField("contents"):
        raise InvalidArgument(f"{tensor.name}.contents", "set", "unset if raw_input_contents is set")
    values = _typed(tensor) if raw is None else list(_unpacked(tensor.name, tensor.datatype, raw))
    if (expected := math.prod(shape)) != len(values):
        raise InvalidArgument(
            tensor.name, f"{len(values)} elements", f"{expected}, as the shape {list(shape)} requires"
        )
    return Tensor(tensor.name, tensor.datatype, shape, values)


def _typed(tensor: pb.ModelInferRequest.InferInputTensor) -> Sequence[Any]:
    if tensor.datatype == "BYTES":
        return tensor.contents.bytes_contents
    _, field = _number(tensor.name, tensor.datatype)
    values: Sequence[Any] = getattr(tensor.contents, field)
    return values


def _unpacked(name: str, datatype: str, raw: bytes) -> Iterator[Any]:
    if datatype == "BYTES":
        yield from _strings(name, raw)
        return
    dtype = np.dtype(_number(name, datatype)[0])
    if len(raw) % dtype.itemsize:
        raise InvalidArgument(
            name, InWords(f"{len(raw)} bytes"), f"a multiple of {dtype.itemsize} bytes, as {datatype} is"
        )
    yield from np.frombuffer(raw, dtype).tolist()


def _strings(name: str, raw: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(raw):
        begin = start + _LENGTH.size
        end = begin + _LENGTH.unpack_from(raw, start)[0] if begin <= len(raw) else begin
        if end > len(raw):
            raise InvalidArgument(
                name, InWords(f"{len(raw)} bytes"), "texts, each behind its length in 4 bytes; it ends in one"
            )
        yield raw[begin:end]
        start = end


def _packed(tensor: Tensor) -> bytes:
    if tensor.datatype == "BYTES":
        return b"".join(_LENGTH.pack(len(value)) + value for value in tensor.values)
    return np.asarray(tensor.values, _NUMBERS[tensor.datatype][0]).tobytes()


def _number(name: str, datatype: str) -> tuple[str, str]:
    try:
        return _NUMBERS[datatype]
    except KeyError:
        raise InvalidArgument(f"{name}.datatype", datatype, f"one of BYTES, {', '.join(_NUMBERS)}") from None
