"""Limits of message sizes and metadata: one below, at, and one above."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from antiphon.v1 import inference_pb2 as pb
from tests.marks import hardship
from tests.serving import asking_whole, serving, stub_of

pytestmark = hardship

MAX_BYTES = 1024
# Tag and length of a text with this number of bytes.
OVERHEAD = len(pb.TokenizeRequest(text="x" * (MAX_BYTES - 3)).SerializeToString()) - (MAX_BYTES - 3)


@pytest.mark.parametrize(("num_bytes", "is_taken"), [(MAX_BYTES - 1, True), (MAX_BYTES, True), (MAX_BYTES + 1, False)])
async def test_messages_are_accepted_up_to_their_maximum_size(num_bytes: int, is_taken: bool) -> None:
    request = pb.TokenizeRequest(text="x" * (num_bytes - OVERHEAD))
    assert len(request.SerializeToString()) == num_bytes
    async with serving(max_message_bytes=MAX_BYTES) as served:
        if is_taken:
            assert (await stub_of(served).Tokenize(request)).token_ids
            return
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(served).Tokenize(request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [("a", True), ("!~" * 63 + "x", True), ("x" * 128, True), ("x" * 129, False), ("", False), ("a b", False)],
)
async def test_request_ids_of_clients_are_kept_when_they_are_well_formed(given: str, is_taken: bool) -> None:
    async with serving() as served:
        call = stub_of(served).GenerateUnary(asking_whole(), metadata=(("x-request-id", given),))
        assert (await call).outputs
        found = dict(await call.trailing_metadata())["x-request-id"]
    assert (found == given) == is_taken
    assert 1 <= len(found) <= 128
