"""Many streams over one real connection: correct answers, clean cancellation, every block free at the end."""

import asyncio
from collections import defaultdict
from typing import Any

import grpc
import grpc.aio
import pytest

from antiphon.client import AsyncClient, Options, ServerError
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.integration.conftest import SENTENCES
from tests.integration.process import ServerProcess, is_idle

NUM_STREAMS = 64
ENDLESS = Options(max_new_tokens=2048)


def text_of(index: int) -> str:
    return " ".join(SENTENCES[index : index + 1 + index % 5])


def options_of(index: int) -> Options:
    if index % 4 == 3:
        return ENDLESS  # to be cancelled
    if index % 8 == 2:
        return Options(max_new_tokens=10 + 3 * index, temperature=1.2, top_k=50, top_p=0.95, seed=index)
    if index % 8 == 6:
        stop_strings = [chr(ord("a") + index % 26), "er "]
        return Options(
            max_new_tokens=60, temperature=1.5, num_return_sequences=3, seed=index, stop_strings=stop_strings
        )
    if index % 8 == 5:
        return Options(max_new_tokens=index, beam_width=2 + index % 4, num_return_sequences=2, repetition_penalty=1.2)
    if index % 8 == 1:
        return Options(
            max_new_tokens=40, no_repeat_ngram_size=2, logit_bias={50: 2.0}, min_new_tokens=5, num_logprobs=2
        )
    return Options(max_new_tokens=1 + 3 * index)


def outcomes(metrics: dict[str, float]) -> dict[str, float]:
    """Return the number of requests by their end."""
    names = ("request_success", "cancellations", "deadline_misses", "request_errors", "requests_refused")
    return {
        name: sum(value for key, value in metrics.items() if key.startswith(f"antiphon_{name}_total")) for name in names
    }


async def streamed(client: AsyncClient, index: int) -> list[str] | None:
    """Return the joined deltas of each output of a stream; None for a stream cancelled after its first message."""
    texts: dict[int, str] = defaultdict(str)
    stream = client.generate(text_of(index), options_of(index))
    async for delta in stream:
        if options_of(index) is ENDLESS:
            await stream.aclose()
            return None
        texts[delta.output_index] += delta.text
    return [texts[output] for output in sorted(texts)]


async def whole(client: AsyncClient, index: int) -> list[str]:
    return [output.text for output in await client.generate_outputs(text_of(index), options_of(index))]


async def test_64_mixed_streams_get_the_answers_of_each_alone_and_free_every_block(server: ServerProcess) -> None:
    before = outcomes(server.metrics())
    async with AsyncClient(server.target) as client:
        crowd = await asyncio.gather(*(streamed(client, index) for index in range(NUM_STREAMS)))
        num_cancelled = sum(texts is None for texts in crowd)
        # The server can also be idle between two requests, while a cancellation is still on its way.
        metrics = server.wait_for_metrics(
            lambda found: is_idle(found) and outcomes(found)["cancellations"] - before["cancellations"] >= num_cancelled
        )
        alone = [None if texts is None else await whole(client, index) for index, texts in enumerate(crowd)]
    assert crowd == alone
    after = outcomes(metrics)
    assert after["cancellations"] - before["cancellations"] == num_cancelled == NUM_STREAMS // 4
    assert after["request_success"] - before["request_success"] == NUM_STREAMS - num_cancelled
    assert {name: after[name] - before[name] for name in ("deadline_misses", "request_errors")} == {
        "deadline_misses": 0,
        "request_errors": 0,
    }
    # 64 rows of the longest sequences: 256 source and 2,048 target tokens in blocks of 16.
    assert metrics["antiphon_kv_cache_blocks{use=free}"] == 64 * (256 + 2048) / 16
    assert metrics["antiphon_kv_cache_usage_ratio"] == 0


@pytest.mark.parametrize("text", [SENTENCES[0], "Ärger über Ölfässer", "日本語 🜁 ünï", "x", "a\u0301 e\u0301"])
async def test_streamed_text_equals_unary_text(server: ServerProcess, text: str) -> None:
    options = Options(max_new_tokens=60, temperature=3.0, seed=11)  # hot enough to split characters between tokens
    async with AsyncClient(server.target) as client:
        deltas = [delta async for delta in client.generate(text, options)]
        whole = await client.generate_text(text, options)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [token for delta in deltas for token in delta.token_ids] == list(whole.token_ids)
    assert deltas[-1].usage == whole.usage


@pytest.mark.parametrize("prefix", ["Der", "Ärger über", "日本"])
async def test_prefix_and_text_are_the_whole_target(server: ServerProcess, prefix: str) -> None:
    options = Options(max_new_tokens=20, prefix_text=prefix)
    async with AsyncClient(server.target) as client:
        text = (await client.generate_text(SENTENCES[0], options)).text
        ids = (await client.generate_text(SENTENCES[0], options)).token_ids
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub = InferenceServiceStub(channel)
            given = (await stub.Tokenize(pb.TokenizeRequest(text=prefix))).token_ids
            target = (await stub.Detokenize(pb.DetokenizeRequest(token_ids=[*given, *ids]))).text
    assert prefix + text == target


async def test_score_equals_the_log_probabilities_of_generation(server: ServerProcess) -> None:
    """The numbers are bitwise equal for a generated and for a given token."""
    async with AsyncClient(server.target) as client:
        written = await client.generate_text(SENTENCES[0], Options(max_new_tokens=30, num_logprobs=2))
        scored = await client.score(SENTENCES[0], written.token_ids, num_alternatives=2)
    assert scored.logprobs[: len(written.logprobs)] == written.logprobs
    assert scored.usage.source_tokens == written.usage.source_tokens


async def test_embeddings_differ_between_texts_and_are_equal_when_repeated(server: ServerProcess) -> None:
    async with AsyncClient(server.target) as client:
        vectors = [(await client.embed(text, normalize=True)).vector for text in SENTENCES[:8]]
        crowd = await asyncio.gather(*(client.embed(text, normalize=True) for text in SENTENCES[:8]))
    assert [embedding.vector for embedding in crowd] == vectors
    assert len(set(vectors)) == len(vectors)
    assert sum(x * x for x in vectors[0]) == pytest.approx(1, abs=1e-5)


async def test_explain_returns_every_head_of_the_model(server: ServerProcess) -> None:
    async with AsyncClient(server.target) as client:
        answer = await client.explain(SENTENCES[0], SENTENCES[1])
    assert len(answer.encoder_self) == len({(one.layer, one.head) for one in answer.encoder_self})
    assert len(answer.cross) == len({(one.layer, one.head) for one in answer.cross}) == len(answer.decoder_self)
    for one in (*answer.encoder_self, *answer.decoder_self, *answer.cross):
        rows = [one.weights[start : start + one.columns] for start in range(0, len(one.weights), one.columns)]
        assert len(rows) == one.rows
        assert [sum(row) for row in rows] == pytest.approx([1.0] * one.rows, abs=1e-5)
    assert {(one.rows, one.columns) for one in answer.cross} == {(len(answer.target_tokens), len(answer.source_tokens))}


async def test_expired_deadlines_free_their_blocks(server: ServerProcess) -> None:
    before = outcomes(server.metrics())
    async with AsyncClient(server.target) as client:
        calls = [client.generate_text(text_of(index), ENDLESS, timeout_s=0.05) for index in range(16)]
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert {getattr(result, "code", None) for result in results} == {grpc.StatusCode.DEADLINE_EXCEEDED}
    after = outcomes(server.wait_for_metrics(is_idle))
    ended = {name: after[name] - before[name] for name in after}
    assert ended["request_success"] == ended["request_errors"] == 0


def serialised(**fields: Any) -> bytes:
    return pb.GenerateRequest(**fields).SerializeToString()


BAD_REQUESTS: list[tuple[bytes, grpc.StatusCode, str]] = [
    (serialised(text=""), grpc.StatusCode.INVALID_ARGUMENT, "text"),
    (serialised(), grpc.StatusCode.INVALID_ARGUMENT, "source"),
    (serialised(text="wort " * 240), grpc.StatusCode.INVALID_ARGUMENT, "1 to 256 tokens long"),
    (serialised(model="nope", text="a"), grpc.StatusCode.NOT_FOUND, "'nope'"),
    (serialised(text="a", options=pb.GenerateOptions(top_p=2)), grpc.StatusCode.INVALID_ARGUMENT, "options.top_p"),
    (
        serialised(text="a", options=pb.GenerateOptions(max_new_tokens=-1)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "options.max_new_tokens",
    ),
    (
        serialised(text="a", options=pb.GenerateOptions(beam_width=4, temperature=1)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "options.temperature",
    ),
    (
        serialised(text="a", options=pb.GenerateOptions(suppressed_ids=[400_000])),
        grpc.StatusCode.INVALID_ARGUMENT,
        "options.suppressed_ids",
    ),
    (serialised(token_ids=pb.TokenIds(ids=[16383])), grpc.StatusCode.INVALID_ARGUMENT, "16383"),
    (b"\x12\x02\xc3\x28", grpc.StatusCode.INVALID_ARGUMENT, "valid UTF-8"),
    (b"\xff\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, "message"),
    (serialised(text="x" * 5_000_000), grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
]


async def test_bad_requests_are_refused_without_effect_on_others(server: ServerProcess) -> None:
    options = Options(max_new_tokens=1500)
    async with AsyncClient(server.target) as client, grpc.aio.insecure_channel(server.target) as channel:
        alone = await client.generate_text(SENTENCES[0], options)
        neighbour = asyncio.ensure_future(_joined(client, options))
        for data, code, message in BAD_REQUESTS:
            for kind in ("Generate", "GenerateUnary"):
                error = await _refusal(channel, kind, data)
                assert error.code() is code
                assert message in (error.details() or "")
        assert await neighbour == alone.text
        with pytest.raises(ServerError, match="tokens long"):
            await client.generate_text("wort " * 2000)
    server.wait_for_metrics(is_idle)


async def _joined(client: AsyncClient, options: Options) -> str:
    return "".join([delta.text async for delta in client.generate(SENTENCES[0], options)])


async def _refusal(channel: grpc.aio.Channel, kind: str, data: bytes) -> grpc.aio.AioRpcError:
    method = f"/antiphon.v1.InferenceService/{kind}"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (_read(channel, method, data) if kind == "Generate" else _ask(channel, method, data))
    return caught.value


async def _read(channel: grpc.aio.Channel, method: str, data: bytes) -> Any:
    call: Any = channel.unary_stream(method)
    return await call(data).read()


async def _ask(channel: grpc.aio.Channel, method: str, data: bytes) -> Any:
    call: Any = channel.unary_unary(method)
    return await call(data)
