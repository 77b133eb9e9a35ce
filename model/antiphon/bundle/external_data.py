"""List of the files that an ONNX graph reads weights from, found without the onnx package.

Only the protobuf fields that lead to external data are declared, with the field numbers of onnx.proto (IR version 4
and newer). ONNX Runtime opens every file that a graph names, so the manifest must list each of them with its checksum.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

_PACKAGE = "antiphon.external_data"
# For each message: the numbers of the fields on the path to external data, and the message type of each field. Nodes
# contain graphs too (subgraphs of control flow).
_FIELDS: dict[str, dict[int, str]] = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Function": {7: "Node", 11: "Attribute"},
    "Graph": {1: "Node", 5: "Tensor", 15: "Sparse"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "Sparse", 23: "Sparse"},
    "Sparse": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
    "Entry": {},
}
_KEY, _VALUE = 1, 2


class NotAGraph(Exception):
    """The file is not an ONNX model."""


def external_files(path: Path) -> set[str]:
    """Return the `location` values of all external tensors of a graph. Raises NotAGraph or OSError."""
    try:
        model = _model_class().FromString(path.read_bytes())
    except DecodeError:
        raise NotAGraph(f"{path} is not an ONNX graph") from None
    return {location.decode("utf-8", "surrogateescape") for location in _locations(model)}


def _locations(message: Message) -> Iterator[bytes]:
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for inner in value:
            if inner.DESCRIPTOR.name != "Entry":
                yield from _locations(inner)
            elif inner.key == b"location":
                yield inner.value


@cache
def _model_class() -> type[Message]:
    file = FileDescriptorProto(name="antiphon/external_data.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for number, kind in fields.items():  # protobuf parses a singular field as a repeated field with one element
            message.field.add(
                name=f"field_{number}",
                number=number,
                label=FieldDescriptorProto.LABEL_REPEATED,
                type=FieldDescriptorProto.TYPE_MESSAGE,
                type_name=f".{_PACKAGE}.{kind}",
            )
    for name, number in (("key", _KEY), ("value", _VALUE)):
        file.message_type[-1].field.add(
            name=name,
            number=number,
            label=FieldDescriptorProto.LABEL_OPTIONAL,
            type=FieldDescriptor.TYPE_BYTES,
        )
    pool = DescriptorPool()
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Model"))
