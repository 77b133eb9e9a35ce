"""The typed client, asynchronous and synchronous, against a real server over a fake model."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator

import grpc
import pytest

from antiphon.client import AsyncClient, Client, Generation, Options, ServerError
from antiphon.service.engine import EngineConfig
from tests.fakes import EOS_ID
from tests.serving import Gate, serving

SOURCES = [(3 + i % 20, 40 + i) for i in range(20)]
MALFORMED: tuple[int, ...] = ()


async def test_async_client_streams_what_it_returns_whole() -> None:
    async with serving() as served, AsyncClient(served.target) as client:
        deltas = [delta async for delta in client.generate(SOURCES[5])]
        whole = await client.generate_text(SOURCES[5])
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == list(whole.token_ids)
    last = deltas[-1]
    assert last.usage == whole.usage
    assert (last.finish_reason, whole.finish_reason) == ("stop", "stop")
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert whole.timing.total_s >= (whole.timing.time_to_first_token_s or 0) > 0


async def test_sync_client_agrees_with_the_async_one() -> None:
    def ask(target: str) -> tuple[str, Generation, list[Generation | ServerError]]:
        with Client(target) as client:
            streamed = "".join(delta.text for delta in client.generate(SOURCES[3]))
            return streamed, client.generate_text(SOURCES[3]), list(client.generate_many(SOURCES, concurrency=4))

    async with serving() as served, AsyncClient(served.target) as client:
        streamed, whole, many = await asyncio.to_thread(ask, served.target)
        expected = [result async for result in client.generate_many(SOURCES)]
    assert streamed == whole.text == text_of(expected[3])
    assert [text_of(result) for result in many] == [text_of(result) for result in expected]


async def test_generate_many_keeps_order_and_yields_refusals_in_their_place() -> None:
    async def sources() -> AsyncIterator[tuple[int, ...]]:
        for source in (*SOURCES, MALFORMED, *SOURCES):
            yield source

    async with serving() as served, AsyncClient(served.target) as client:
        results = [result async for result in client.generate_many(sources(), concurrency=5)]
        expected = [served.runner.answer((*source, EOS_ID))[0] for source in SOURCES]
    refused = results.pop(len(SOURCES))
    assert [list(result.token_ids) for result in results if isinstance(result, Generation)] == expected * 2
    assert isinstance(refused, ServerError)
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert refused.field == "token_ids"


async def test_client_sends_options_with_zero_and_absent_ones_apart() -> None:
    async with serving() as served, AsyncClient(served.target) as client:
        with pytest.raises(ServerError, match=r"options\.max_new_tokens is 0") as caught:
            await client.generate_text(SOURCES[0], Options(max_new_tokens=0))
        seeded = await client.generate_text(SOURCES[0], Options(temperature=1.0, seed=0))
    assert caught.value.field == "options.max_new_tokens"
    assert seeded.seed == 0


async def test_client_names_the_option_that_does_not_fit_its_field() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=r"options\.seed is -1"):
            await client.generate_text("a", Options(seed=-1))


async def test_leaving_a_stream_cancels_its_work() -> None:
    async with serving() as served, AsyncClient(served.target) as client:
        stream = client.generate((30, 30))
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]
        await served.calls.wait_until_idle()
        assert await asyncio.to_thread(served.engine.drain, 60)
        assert len(served.runner.decoded_rows) <= 31


async def test_client_retries_after_pushback_when_the_queue_was_full() -> None:
    config = EngineConfig(max_num_seqs=1, max_queued_requests=1)
    async with serving(config) as served, AsyncClient(served.target) as client:
        gate = Gate(served.runner)
        calls = [asyncio.ensure_future(client.generate_text(SOURCES[0])) for _ in range(3)]
        await asyncio.to_thread(gate.reached.wait, 60)
        gate.open()
        answers = await asyncio.gather(*calls)
    assert len({answer.text for answer in answers}) == 1


async def test_client_passes_its_timeout_on_as_the_deadline() -> None:
    async with serving() as served, AsyncClient(served.target) as client:
        gate = Gate(served.runner)
        with pytest.raises(ServerError) as caught:
            await client.generate_text(SOURCES[0], timeout_s=0.1)
        gate.open()
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_client_reports_unavailable_when_nobody_listens() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ServerError) as caught:
            await client.get_model()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_get_model_reports_the_limits() -> None:
    async with serving() as served, AsyncClient(served.target) as client:
        model = await client.get_model()
        synchronous = await asyncio.to_thread(_model_name, served.target)
    assert model.limits.max_source_len == served.runner.max_source_len
    assert synchronous == model.name


def _model_name(target: str) -> str:
    with Client(target) as client:
        return client.get_model().name


def test_client_loads_nothing_but_grpcio_and_protobuf() -> None:
    code = "import sys, antiphon.client, antiphon.generate, antiphon.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    served = {"antiphon.model", "antiphon.service", "google.rpc", "numpy", "onnxruntime", "prometheus_client"}
    assert served.isdisjoint(loaded)
    assert {"pydantic", "tokenizers", "torch", "tqdm", "uvloop"}.isdisjoint(loaded)


def text_of(result: Generation | ServerError) -> str:
    assert isinstance(result, Generation)
    return result.text
