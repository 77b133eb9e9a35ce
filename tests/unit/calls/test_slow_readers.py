"""Clients that do not read: each holds one message and its own tokens for a limited time, and never blocks the engine.

The client's flow-control window is made as small as gRPC allows, so that one answer overflows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.serving import Serving, asking, serving, stub_of

WINDOW_BYTES = 1024
TINY_WINDOW_BYTES = 64  # less than any first message
OPTIONS = [("grpc.http2.bdp_probe", 0), ("grpc.enable_retries", 0)]
# Longer than all tokens take, on a busy machine too.
COMPUTED_S = 5.0
LONG = (30, 30, 31)  # answered with thirty tokens
# Alternatives make a message large: thirty tokens overflow the window several times.
HEAVY: dict[str, Any] = {"num_logprobs": 20, "num_return_sequences": 2, "temperature": 1.0, "seed": 1}


@contextlib.asynccontextmanager
async def stuck(
    served: Serving, *, timeout_s: float | None = None, window_bytes: int = WINDOW_BYTES
) -> AsyncIterator[Any]:
    """Stream that its client does not read, on a separate channel."""
    options = [*OPTIONS, ("grpc.http2.lookahead_bytes", window_bytes)]
    async with grpc.aio.insecure_channel(served.target, options=options) as channel:
        yield InferenceServiceStub(channel).Generate(asking(LONG, **HEAVY), timeout=timeout_s)


async def idle(served: Serving) -> None:
    async with asyncio.timeout(60):
        await served.calls.wait_until_idle()


def ended(served: Serving) -> dict[str, float]:
    """Return the ends of requests without a full answer, by cause and stage."""
    return {
        f"{sample.labels.get('cause', 'deadline')}/{sample.labels['stage']}": sample.value
        for family in served.registry.collect()
        for sample in family.samples
        if sample.name in ("antiphon_cancellations_total", "antiphon_deadline_misses_total") and sample.value
    }


class Steps:
    """Reports the begin of the first step, and blocks a step on request."""

    def __init__(self, served: Serving) -> None:
        self._served = served
        self._begun = threading.Event()
        self._released = threading.Event()
        self._held: int | None = None
        served.runner.before_decode = self._pass

    def hold(self, step: int) -> None:
        self._held = step

    def release(self) -> None:
        self._released.set()

    async def begun(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, 60)

    async def over(self) -> None:
        """Wait until the engine has no work left."""
        assert await asyncio.to_thread(self._served.engine.drain, 60)

    def _pass(self, num_rows: int) -> None:
        self._begun.set()
        if len(self._served.runner.decoded_rows) == self._held:
            assert self._released.wait(60)


async def test_unread_stream_does_not_hold_the_engine_and_is_ended_after_a_while() -> None:
    async with serving(slow_reader_timeout_s=COMPUTED_S) as served, stuck(served) as call:
        steps = Steps(served)
        await steps.begun()
        neighbour = await stub_of(served).GenerateUnary(pb.GenerateUnaryRequest(token_ids=pb.TokenIds(ids=(9, 30))))
        assert neighbour.outputs[0].finish_reason == pb.FINISH_REASON_STOP
        await idle(served)
        await steps.over()
        assert ended(served) == {"slow_reader/streaming": 1.0}
        await expect_slow_reader(call)


async def test_reader_of_nothing_at_all_is_told_why_its_stream_ended() -> None:
    """Not even the first message fits the window; the status still comes once it is read."""
    async with serving(slow_reader_timeout_s=0.3) as served, stuck(served, window_bytes=TINY_WINDOW_BYTES) as call:
        await Steps(served).begun()
        await idle(served)
        await expect_slow_reader(call)


async def test_slow_reader_gives_up_its_rows_and_blocks_while_it_runs() -> None:
    """The engine is held until the reader's patience is over; then the next step must not decode for it."""
    async with serving(slow_reader_timeout_s=0.3) as served:
        steps = Steps(served)
        steps.hold(20)  # the window is full by then
        async with stuck(served):
            await steps.begun()
            await idle(served)
            steps.release()
            await steps.over()
        assert len(served.runner.decoded_rows) == 21
        assert ended(served) == {"slow_reader/running": 1.0}


async def test_deadline_ends_a_stream_that_waits_for_its_reader() -> None:
    async with serving() as served, stuck(served, timeout_s=COMPUTED_S) as call:
        steps = Steps(served)
        await steps.begun()
        await idle(served)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await steps.over()
        assert ended(served) == {"deadline/streaming": 1.0}


async def test_client_that_hangs_up_ends_a_stream_that_waits_for_its_reader() -> None:
    async with serving() as served:
        async with stuck(served) as call:
            steps = Steps(served)
            await steps.begun()
            await steps.over()
            call.cancel()
            await idle(served)
        assert ended(served) == {"client/streaming": 1.0}


async def test_reader_that_is_slow_but_in_time_gets_every_token() -> None:
    async with serving(slow_reader_timeout_s=60) as served:
        expected = await joined(stub_of(served).Generate(asking(LONG, **HEAVY)))
        assert sum(map(len, expected.values())) == 2 * (30 + 1)  # end tokens have log-probabilities too
        async with stuck(served) as call:
            steps = Steps(served)
            await steps.begun()
            await steps.over()
            assert await joined(call) == expected
        assert ended(served) == {}


async def expect_slow_reader(call: Any) -> None:
    """Read what has come of a stream, and then that it was ended for being read too late."""
    async with asyncio.timeout(60):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(caught.value.details()).startswith("the client took no message for ")


async def joined(call: Any) -> dict[int, list[pb.TokenLogprob]]:
    """Return the tokens of each output of a stream. Their messages together exceed the flow-control window."""
    outputs: dict[int, list[pb.TokenLogprob]] = {0: [], 1: []}
    num_bytes = 0
    async for message in call:
        outputs[message.output_index] += message.logprobs
        num_bytes += message.ByteSize()
    assert num_bytes > 4 * WINDOW_BYTES
    return outputs
