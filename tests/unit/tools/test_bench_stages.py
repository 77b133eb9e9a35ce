"""Stages of the event loop: times of methods and handlers are counted once, and only those of the measuring thread."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc
import grpc.aio

from antiphon.text.tokenizer import Tokenizer
from antiphon.tools.bench.child_servers import HANDLERS, StageTimes
from tests.serving import tiny_tokenizer

SPENT_S = 0.02


def spend() -> None:
    end_s = time.thread_time() + SPENT_S
    while time.thread_time() < end_s:
        pass


def test_time_of_an_inner_stage_is_not_counted_for_the_outer_one() -> None:
    times = StageTimes()
    with times.within(HANDLERS):
        spend()
        with times.within("tokenising"):
            spend()
            spend()
    assert SPENT_S <= times.seconds[HANDLERS] < 2 * SPENT_S <= times.seconds["tokenising"]
    assert times.thread_s() >= 3 * SPENT_S


def test_methods_are_measured_in_this_thread_until_the_context_is_left() -> None:
    encode, times, tokenizer = Tokenizer.encode, StageTimes(), tiny_tokenizer()
    with times.measuring():
        thread = threading.Thread(target=tokenizer.encode, args=("the cat",))
        thread.start()
        thread.join()
        assert times.seconds["tokenising"] == 0
        for _ in range(1000):  # more than a tick of any clock
            assert tokenizer.encode("the cat") == encode(tokenizer, "the cat")
        assert times.seconds["tokenising"] > 0
    assert Tokenizer.encode is encode


async def test_handlers_of_a_server_are_measured_without_the_stages_in_them() -> None:
    times, tokenizer = StageTimes(), tiny_tokenizer()

    async def answer(request: bytes, context: Any) -> bytes:
        spend()
        return str(tokenizer.encode(request.decode())).encode()

    methods: dict[str, Any] = {"Encode": grpc.unary_unary_rpc_method_handler(answer)}
    with times.measuring():
        server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary("/test.Service/Encode")
        with times.measuring():
            answers = [await call(b"the cat") for _ in range(2)]
    await server.stop(None)
    assert answers == [str(tokenizer.encode("the cat")).encode()] * 2
    assert times.seconds[HANDLERS] >= 2 * SPENT_S
    assert times.seconds["tokenising"] < SPENT_S
