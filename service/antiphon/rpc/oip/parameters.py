"""Reads parameters of the Open Inference Protocol into the fields of antiphon.v1's requests with the same names.

A number sets a numeric field. A text sets every other field: an enum by the name of its value, a list or a map as JSON.
This module defines the parameters and their types; antiphon.v1 checks the ranges.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from antiphon.domain.errors import InvalidArgument
from antiphon.oip import inference_pb2 as oip
from antiphon.v1 import inference_pb2 as pb

# Parameters that are no fields of antiphon.v1. An empty final response is never sent: the last response is marked.
_OWN = ("timeout", "triton_enable_empty_final_response")
# Fields that tensors set, and log-probabilities, for which there is no tensor.
_NOT_PARAMETERS = {"model", "text", "token_ids", "text_pair", "options", "num_logprobs"}
_MAX_TIMEOUT_US = 2**53

Parameters = Mapping[str, oip.InferParameter]


@dataclass(frozen=True, slots=True)
class ReadParameters:
    """Result of reading the parameters of a request."""

    message: Any
    """Request of antiphon.v1 with the fields that the parameters set."""
    timeout_s: float | None
    """Time limit; None is no limit."""


def read_parameters(kind: type[Message], parameters: Parameters) -> ReadParameters:
    """Return a message of a kind with the fields that parameters set. Raises InvalidArgument naming the parameter."""
    message = kind()
    options = message.options if "options" in kind.DESCRIPTOR.fields_by_name else None  # type: ignore[attr-defined]
    fields = _fields(kind)
    for name in sorted(parameters.keys() - set(_OWN)):
        if name not in fields:
            raise InvalidArgument("parameters", [name[:64]], f"of {', '.join([*fields, *_OWN])}")
        field = fields[name]
        into = message if field.containing_type is kind.DESCRIPTOR else options
        _fill(into, field, _value(name, parameters[name]))
    return ReadParameters(message, _timeout_s(parameters))


def _fields(kind: type[Message]) -> dict[str, Any]:
    """Return the descriptors of the fields that parameters can set, options included, by name."""
    fields: list[Any] = list(kind.DESCRIPTOR.fields)
    if "options" in kind.DESCRIPTOR.fields_by_name:
        fields += pb.GenerateOptions.DESCRIPTOR.fields
    return {field.name: field for field in fields if field.name not in _NOT_PARAMETERS}


def _value(name: str, parameter: oip.InferParameter) -> Any:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidArgument(f"parameters.{name}", None, "set to a value")
    return getattr(parameter, kind)


def _timeout_s(parameters: Parameters) -> float | None:
    if "timeout" not in parameters:
        return None
    micros = _value("timeout", parameters["timeout"])
    if isinstance(micros, bool) or not isinstance(micros, int) or not 0 <= micros <= _MAX_TIMEOUT_US:
        raise InvalidArgument("parameters.timeout", micros, f"microseconds from 0 (no limit) to {_MAX_TIMEOUT_US}")
    return micros / 1e6 if micros else None


def _fill(message: Any, field: FieldDescriptor, value: Any) -> None:
    try:
        if field.is_repeated:
            _fill_many(message, field, value)
        elif field.message_type is not None:  # TokenIds
            getattr(message, field.name).ids.extend(_listed(value))
        else:
            setattr(message, field.name, _scalar(field, value))
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise InvalidArgument(f"parameters.{field.name}", value, _allowed(field)) from None


def _fill_many(message: Any, field: FieldDescriptor, value: Any) -> None:
    into = getattr(message, field.name)
    if field.message_type is None:
        into.extend(_listed(value))
        return
    biases = json.loads(value)  # a map from token ids
    if not isinstance(biases, dict):
        raise TypeError
    into.update({int(token_id): float(bias) for token_id, bias in biases.items()})


def _listed(value: Any) -> list[Any]:
    """Return the elements of a JSON array; of any other value, a list with this value."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        elements = json.loads(value)
        return list(elements)
    return [value]


def _scalar(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None and isinstance(value, str):
        return _enum_value(field.enum_type, value)
    if (field.type == FieldDescriptor.TYPE_BOOL) != isinstance(value, bool):
        raise TypeError
    return value


def _enum_value(enum: EnumDescriptor, name: str) -> int:
    """Return an enum's value by its name, with or without the enum's prefix, in upper or lower case."""
    prefix = _prefix(enum)
    full_name = name.upper() if name.upper().startswith(prefix) else prefix + name.upper()
    if full_name not in enum.values_by_name:
        raise ValueError
    return int(enum.values_by_name[full_name].number)


def _prefix(enum: EnumDescriptor) -> str:
    """Return the prefix of the names of an enum's values."""
    return enum.values[0].name.removesuffix("UNSPECIFIED")


def _allowed(field: FieldDescriptor) -> str:
    if field.enum_type is not None:
        names = [value.name.removeprefix(_prefix(field.enum_type)).lower() for value in field.enum_type.values[1:]]
        return f"one of {', '.join(names)}"
    if field.is_repeated and field.message_type is not None:
        return 'a JSON object of token ids and numbers, such as {"17": -2.5}'
    if field.is_repeated or field.message_type is not None:
        inner = field.message_type.fields_by_name["ids"] if field.message_type is not None else field
        return f"a JSON array, each element {_KINDS[inner.cpp_type]}"
    return _KINDS[field.cpp_type]


_KINDS: Mapping[int, str] = {
    FieldDescriptor.CPPTYPE_INT32: "a whole number",
    FieldDescriptor.CPPTYPE_UINT32: "a whole number of 0 or more",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number of 0 or more",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "a text",
}
