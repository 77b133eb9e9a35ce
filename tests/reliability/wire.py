"""Random serialised messages, built byte by byte: valid ones, and ones that no client should send.

Uses only descriptors, so a field that is added to the contract is fuzzed at once.
"""

import struct
from collections.abc import Callable
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Bytes = SearchStrategy[bytes]

_TEXTS = ["the cat", "sat on the mat", "eine kühle Brücke", "", " ", "\x00", "日本語 🜁", "e\u0301", "x" * 3000]
_NO_TEXTS = [b"\xc3\x28", b"\xff", b"\xed\xa0\x80", b"the cat\xe2\x82", b"\xf8\x88\x80\x80\x80"]
_ODD_INTEGERS = [-1, -(2**31), -(2**63), 100, 255, 1024, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
_ODD_NUMBERS = [float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324, -0.0, -1.0, 101.0, 1e39]
_FLOATS = {FieldDescriptor.TYPE_DOUBLE: "<d", FieldDescriptor.TYPE_FLOAT: "<f"}
_VARINT, _FIXED64, _LENGTH, _BEGIN, _END, _FIXED32 = range(6)
# Field numbers that no message of ours has.
_UNKNOWN = st.sampled_from([99, 1000, 18_999, 2**29 - 1])


def varint(value: int) -> bytes:
    """Encode the low 64 bits of a number in base 128."""
    value %= 2**64
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _tagged(number: int, kind: int, payload: bytes) -> bytes:
    return varint(number << 3 | kind) + payload


def _delimited(number: int, payload: bytes) -> bytes:
    return _tagged(number, _LENGTH, varint(len(payload)) + payload)


def messages(descriptor: Descriptor, given: dict[str, Bytes] | None = None) -> Bytes:
    """Draw serialised messages of a type: most can be parsed, some are valid, some are truncated or damaged.

    given: usual values of fields by name, serialised without their tags.
    """
    return st.one_of(*[_message(descriptor, given or {})] * 4, _bent(_message(descriptor, given or {})), st.binary())


def _message(descriptor: Descriptor, given: dict[str, Bytes]) -> Bytes:
    first_of_each = [oneof.fields[0] for oneof in descriptor.oneofs if len(oneof.fields) > 1]
    some = st.lists(st.sampled_from(tuple(descriptor.fields)), max_size=4) if descriptor.fields else st.just([])
    known = some.flatmap(lambda fields: _joined([_field(field, given) for field in [*first_of_each, *fields]]))
    return st.one_of(*[known] * 5, _joined([known, _unknown()]))


def _joined(parts: list[Bytes]) -> Bytes:
    return st.tuples(*parts).map(b"".join)


def _field(field: FieldDescriptor, given: dict[str, Bytes]) -> Bytes:
    """Draw a field, mostly as declared, otherwise with the wire type of another field."""
    stranger = st.builds(_delimited, st.just(field.number), st.binary(max_size=20))
    usual = _usual(field, given)
    return st.one_of(*[usual] * 9, stranger)


def _usual(field: FieldDescriptor, given: dict[str, Bytes]) -> Bytes:
    number = field.number
    if field.name in given:
        return given[field.name].map(lambda payload: _delimited(number, payload))
    if (kind := field.message_type) is not None:
        nested = st.deferred(lambda: _message(kind, given))
        return nested.map(lambda payload: _delimited(number, payload))
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return _texts().map(lambda payload: _delimited(number, payload))
    one, wire_type = _scalar(field)
    single = one.map(lambda payload: _tagged(number, wire_type, payload))
    if not field.is_repeated:
        return single
    packed = st.lists(one, max_size=20).map(b"".join).map(lambda payload: _delimited(number, payload))
    return st.one_of(packed, packed, single)


def _texts() -> Bytes:
    good = st.one_of(st.sampled_from(_TEXTS), st.text(max_size=40)).map(str.encode)
    return st.one_of(*[good] * 8, st.sampled_from(_NO_TEXTS))


def _scalar(field: FieldDescriptor) -> tuple[Bytes, int]:
    """Return payloads of one value, and their wire type."""
    if (form := _FLOATS.get(field.type)) is not None:
        numbers = st.one_of(st.floats(0, 2), st.floats(0, 2), st.floats(), st.sampled_from(_ODD_NUMBERS))
        pack: Callable[[Any], bytes] = lambda number: struct.pack(form, _fitting(form, number))  # noqa: E731
        return numbers.map(pack), _FIXED64 if form == "<d" else _FIXED32
    integers = st.one_of(*[st.integers(0, 24)] * 5, st.sampled_from(_ODD_INTEGERS))
    return integers.map(varint), _VARINT


def _fitting(form: str, number: float) -> float:
    """Return the number, or infinity if it is outside the range of float32."""
    try:
        struct.pack(form, number)
    except OverflowError:
        return float("inf")
    return number


def _unknown() -> Bytes:
    """Draw fields that the message does not have: values of each wire type, and nested groups, closed and unclosed."""
    values = st.one_of(
        st.binary(max_size=9).map(lambda payload: (_LENGTH, varint(len(payload)) + payload)),
        st.just((_VARINT, varint(2**64 - 1))),
        st.just((_FIXED64, b"\xff" * 8)),
        st.just((_FIXED32, b"\xff" * 4)),
    )
    plain = st.builds(lambda number, value: _tagged(number, *value), _UNKNOWN, values)
    depth = st.sampled_from([1, 50, 99, 101, 5000])
    groups = st.builds(
        lambda deep, ends: _tagged(99, _BEGIN, b"") * deep + _tagged(99, _END, b"") * (deep if ends else 0),
        depth,
        st.booleans(),
    )
    return st.one_of(plain, plain, groups)


def _bent(whole: Bytes) -> Bytes:
    """Truncate the bytes, or change one of them."""
    cut = st.builds(lambda data, at: data[: at % (len(data) + 1)], whole, st.integers(0))
    flipped = st.builds(
        lambda data, at, value: data if not data else _replaced(data, at % len(data), value),
        whole,
        st.integers(0),
        st.integers(0, 255),
    )
    return st.one_of(cut, flipped)


def _replaced(data: bytes, at: int, value: int) -> bytes:
    return data[:at] + bytes([value]) + data[at + 1 :]
