"""Order of middlewares, and contexts of the requests of a call."""

from __future__ import annotations

import time
from typing import Any

import pytest

from antiphon.observability.call import CallRecord
from antiphon.rpc.context import Metadata, RequestContext
from antiphon.rpc.endpoints import Handler, ServerCall
from antiphon.rpc.middleware import compose
from tests.waits import client_waits

CALL: Any = object()


class Client:
    """Records what a call sends."""

    def __init__(self) -> None:
        self.headers: list[Metadata] = []
        self.messages: list[bytes] = []

    async def send_headers(self, headers: Metadata) -> None:
        self.headers.append(headers)

    async def send(self, data: bytes) -> None:
        self.messages.append(data)


def context_of(client: Client, *, left_s: float | None = None) -> RequestContext:
    return RequestContext(
        record=CallRecord(method="m", request_id="call-1", arrival_s=0.0, caller="alice"),
        metadata=(("key", "value"),),
        deadline_s=None if left_s is None else time.monotonic() + left_s,
        waits=client_waits(),
        send=client.send,
        send_headers=client.send_headers,
    )


async def test_the_first_middleware_is_outermost_and_may_end_a_call_itself() -> None:
    order: list[str] = []

    async def outer(handler: Handler, call: ServerCall) -> Any:
        order.append("outer")
        try:
            return await handler(call)
        finally:
            order.append("outer ends")

    async def inner(handler: Handler, call: ServerCall) -> Any:
        order.append("inner")
        return await handler(call)

    async def refuse(handler: Handler, call: ServerCall) -> Any:
        raise ValueError

    async def endpoint(call: ServerCall) -> str:
        order.append("endpoint")
        return "answer"

    assert await compose((outer, inner), endpoint)(CALL) == "answer"
    assert order == ["outer", "inner", "endpoint", "outer ends"]
    order.clear()
    with pytest.raises(ValueError, match=r"^$"):
        await compose((outer, refuse, inner), endpoint)(CALL)
    assert order == ["outer", "outer ends"]


@pytest.mark.parametrize(
    ("left_s", "timeout_s", "expected_s"),
    [(None, None, None), (50.0, None, 50.0), (None, 5.0, 5.0), (50.0, 5.0, 5.0), (5.0, 50.0, 5.0), (-1.0, 5.0, 0.0)],
)
def test_a_request_has_the_earlier_of_its_own_and_the_calls_deadline(
    left_s: float | None, timeout_s: float | None, expected_s: float | None
) -> None:
    remaining_s = context_of(Client(), left_s=left_s).derive(timeout_s=timeout_s).remaining_s()
    assert remaining_s == (None if expected_s is None else pytest.approx(expected_s, abs=1.0))
    assert remaining_s is None or expected_s is None or remaining_s <= expected_s


async def test_a_request_has_its_own_record_and_the_headers_are_sent_once_by_the_call() -> None:
    client, messages = Client(), list[bytes]()

    async def send(data: bytes) -> None:
        messages.append(data)

    call = context_of(client)
    record = CallRecord(method="m:request", request_id="call-1/7", arrival_s=0.0, caller="alice")
    request = call.derive(record=record, send=send)
    await request.writer().write(b"part")
    assert (request.request_id, request.caller, request.metadata) == ("call-1/7", "alice", call.metadata)
    assert (messages, client.headers, record.num_messages, call.record.num_messages) == ([b"part"], [], 1, 0)
    writer = call.writer()
    await writer.write(b"one")
    await writer.write(b"two")
    assert client.messages == [b"one", b"two"]
    assert client.headers == [(("x-request-id", "call-1"),)]
    assert (record.num_messages, call.record.num_messages) == (1, 2)
