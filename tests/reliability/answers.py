"""Checks that hold for every answer: one terminal event, and a reason in every refusal."""

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor
from google.rpc import error_details_pb2, status_pb2

from antiphon.v1 import inference_pb2 as pb

# Statuses that a request can get from a server without other clients.
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


# Those of a request among others: it may be cancelled, and may have a time limit.
_FAILURES = {code.value[0] for code in (*REFUSALS, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)}


def check_refusal(error: Any, asked: Descriptor) -> None:
    """Check that a refusal has a known status and details, and for invalid input the name of a field of the message."""
    assert error.code() in REFUSALS, f"{error.code()}: {error.details()}"
    packed = dict(error.trailing_metadata())["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(packed)
    assert status.code == error.code().value[0]
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert any(detail.Unpack(info) for detail in status.details)
    assert info.reason
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        assert any(detail.Unpack(bad) for detail in status.details)
        check_field(bad.field_violations[0].field, asked)


def check_field(path: str, asked: Descriptor) -> None:
    """Check that a path names a field or oneof of the message, or is `message` for all of it."""
    if path == "message":
        return
    kind: Descriptor | None = asked
    for name in path.split("."):
        assert kind is not None, f"{path} continues after a field without fields in {asked.full_name}"
        assert name in kind.fields_by_name or name in kind.oneofs_by_name, f"{asked.full_name} has no {path}"
        field = kind.fields_by_name.get(name)
        kind = None if field is None else field.message_type


def check_stream(responses: Iterable[pb.GenerateResponse]) -> None:
    """Check that every output ends exactly once, has no text after that, and that only the last message has usage."""
    ended: set[int] = set()
    seen: set[int] = set()
    last = None
    for response in responses:
        assert last is None or not last.HasField("usage"), "a message follows the last"
        assert response.output_index not in ended, "an output continues after its end"
        seen.add(response.output_index)
        if response.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
            ended.add(response.output_index)
        last = response
    assert last is not None, "a stream without a message"
    assert all(last.HasField(name) for name in ("usage", "timing", "seed"))
    assert seen == ended == set(range(len(ended))), f"outputs {seen}, of which {ended} ended"


def check_many(asked: pb.GenerateManyRequest, responses: Iterable[pb.GenerateManyResponse]) -> None:
    """Check that every request of a call gets its answers and one end, and that no other id is answered."""
    by_id: dict[int, list[pb.ManyAnswer]] = {request.id: [] for request in asked.requests}
    for response in responses:
        for answer in response.answers:
            by_id[answer.id].append(answer)
    for request in asked.requests:
        *before, last = by_id[request.id]
        assert all(answer.HasField("delta") for answer in before)
        if last.HasField("failure"):
            assert last.failure.code in _FAILURES, last.failure.message
            assert last.failure.reason
            if last.failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]:
                is_of_request = last.failure.field not in pb.ManyRequest.DESCRIPTOR.fields_by_name
                check_field(last.failure.field, (pb.GenerateRequest if is_of_request else pb.ManyRequest).DESCRIPTOR)
        elif request.is_whole:
            assert not before
            assert last.whole.outputs
        else:
            check_stream(answer.delta for answer in by_id[request.id])


def violation_of(error: Any) -> str:
    """Return the field that a refusal of invalid input names, or the name of another status."""
    if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
        return str(error.code().name)
    packed = dict(error.trailing_metadata())["grpc-status-details-bin"]
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in status_pb2.Status.FromString(packed).details)
    return str(bad.field_violations[0].field)
