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
TINY_WINDOW_BYTES = 64  # smaller than any first message
OPTIONS = [("grpc.http2.bdp_probe", 0), ("grpc.enable_retries", 0)]
# Much longer than the computation of all tokens, also on a busy machine.
COMPUTED_S = 5.0
LONG = (30, 30, 31)  # answered with thirty tokens
# Alternatives make a message large: thirty tokens overflow the window several times.
HEAVY: dict[str, Any] = {"num_logprobs": 20, "num_return_sequences": 2, "temperature": 1.0, "seed": 1}


@contextlib.asynccontextmanager
async def stuck(
    served: Serving, *, timeout_s: float | None = None, window_bytes: int = WINDOW_BYTES
) -> AsyncIterator[Any]:
    """Open a stream on a separate channel that its client does not read."""
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
    """Reports the start of the first step, and blocks a step on request."""

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


async def test_unread_stream_does_not_block_the_engine_and_is_ended_at_its_time_limit() -> None:
    async with serving(slow_reader_timeout_s=COMPUTED_S) as served, stuck(served) as call:
        steps = Steps(served)
        await steps.begun()
        neighbour = await stub_of(served).GenerateUnary(pb.GenerateUnaryRequest(token_ids=pb.TokenIds(ids=(9, 30))))
        assert neighbour.outputs[0].finish_reason == pb.FINISH_REASON_STOP
        await idle(served)
        await steps.over()
        assert ended(served) == {"slow_reader/streaming": 1.0}
        await expect_slow_reader(call)


async def test_client_that_reads_nothing_receives_the_status_of_its_stream() -> None:
    """The window is smaller than the first message; the client still receives the status when it reads."""
    async with serving(slow_reader_timeout_s=0.3) as served, stuck(served, window_bytes=TINY_WINDOW_BYTES) as call:
        await Steps(served).begun()
        await idle(served)
        await expect_slow_reader(call)


async def test_slow_reader_loses_its_rows_and_blocks_while_its_request_runs() -> None:
    """The engine is blocked until the time limit of the slow reader; then the next step must not decode for it."""
    async with serving(slow_reader_timeout_s=0.3) as served:
        steps = Steps(served)
        steps.hold(20)  # the window is full after these steps
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


async def test_cancellation_ends_a_stream_that_waits_for_its_reader() -> None:
    async with serving() as served:
        async with stuck(served) as call:
            steps = Steps(served)
            await steps.begun()
            await steps.over()
            call.cancel()
            await idle(served)
        assert ended(served) == {"client/streaming": 1.0}


async def test_reader_that_is_slow_but_in_time_receives_every_token() -> None:
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
    """Read the received messages of a stream, and check that it was ended because it was read too late."""
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
