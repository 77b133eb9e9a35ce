"""Parses request messages. A malformed message becomes an InvalidArgument that names the field.

grpc's own parser would answer INTERNAL.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from antiphon.domain.errors import InvalidArgument

Parser = Callable[[bytes], "Message | Malformed"]


@dataclass(frozen=True, slots=True)
class Malformed:
    """Request message that could not be parsed, with the reason."""

    error: InvalidArgument


def parser(kind: type[Message]) -> Parser:
    """Return a parser of one type of message."""

    def parse(data: bytes) -> Message | Malformed:
        try:
            return kind.FromString(data)
        except DecodeError:
            return Malformed(_explain(kind, data))

    return parse


def parsed(parse: Parser, data: bytes) -> Message:
    """Return a parsed message. Raises InvalidArgument."""
    message = parse(data)
    if isinstance(message, Malformed):
        raise message.error
    return message


def _explain(kind: type[Message], data: bytes) -> InvalidArgument:
    """Return an error that names the text field that is not UTF-8, nested fields included, else the whole message."""
    bad_text = _find_bad_text(kind.DESCRIPTOR, data)
    if bad_text is None:
        return InvalidArgument("message", data, f"a serialised {kind.DESCRIPTOR.full_name}")
    return InvalidArgument(*bad_text, "valid UTF-8")


def _find_bad_text(kind: Any, data: bytes) -> tuple[str, bytes] | None:
    """Return path and value of the first text that is not UTF-8, or None. kind: a message's descriptor."""
    try:
        fields = UnknownFieldSet(Empty.FromString(data))
    except DecodeError:
        return None
    for unknown in (fields[index] for index in range(len(fields))):
        field = kind.fields_by_number.get(unknown.field_number)
        if field is None or not isinstance(unknown.data, bytes):
            continue
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(unknown.data):
            return field.name, unknown.data
        if field.message_type is not None and (nested := _find_bad_text(field.message_type, unknown.data)):
            return f"{field.name}.{nested[0]}", nested[1]
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
