"""The contract over a real channel: deltas, terminal messages, refusals, cancellation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from antiphon.domain.limits import EngineLimits
from antiphon.v1 import inference_pb2 as pb
from tests.fakes import BOS_ID, EOS_ID
from tests.serving import (
    MODEL_NAME,
    SOURCE,
    Details,
    Gate,
    asking,
    asking_whole,
    details_of,
    refusal,
    serving,
    stub_of,
)

if TYPE_CHECKING:
    from antiphon.v1.inference_pb2_grpc import InferenceServiceAsyncStub


async def test_generate_streams_the_models_answer_and_one_terminal_message() -> None:
    async with serving() as served:
        messages = [message async for message in stub_of(served).Generate(asking(seed=0))]
        expected, _ = served.runner.answer((*SOURCE, EOS_ID))
    assert [token for message in messages for token in message.token_ids] == expected
    assert [bool(message.finish_reason) for message in messages] == [False] * (len(messages) - 1) + [True]
    assert {message.output_index for message in messages} == {0}
    last = messages[-1]
    assert last.finish_reason == pb.FINISH_REASON_STOP
    assert (last.usage.source_tokens, last.usage.generated_tokens) == (len(SOURCE) + 1, len(expected) + 1)
    assert (last.HasField("seed"), last.seed) == (True, 0)
    timing = last.timing
    assert (
        0 <= timing.queued.ToNanoseconds() <= timing.time_to_first_token.ToNanoseconds() <= timing.total.ToNanoseconds()
    )
    assert not any(message.HasField("usage") or message.HasField("timing") for message in messages[:-1])


async def test_generate_sends_first_token_and_end_only_when_the_budget_of_messages_is_spent() -> None:
    async with serving(max_messages_per_s=1e-3) as served:
        messages = [message async for message in stub_of(served).Generate(asking())]
        expected, _ = served.runner.answer((*SOURCE, EOS_ID))
    assert [token for message in messages for token in message.token_ids] == expected
    assert len(messages) <= 2 < len(expected)


@pytest.mark.parametrize("ids", [(4, 40), (12, 200, 100), (31, 31), (20, 100, 101, 102)])
async def test_generate_deltas_join_to_the_unary_text(ids: tuple[int, ...]) -> None:
    async with serving() as served:
        messages = [message async for message in stub_of(served).Generate(asking(ids))]
        whole = (await stub_of(served).GenerateUnary(asking_whole(ids))).outputs[0]
    assert "".join(message.text_delta for message in messages) == whole.text
    assert [token for message in messages for token in message.token_ids] == list(whole.token_ids)
    assert messages[-1].finish_reason == whole.finish_reason


async def test_generate_ends_by_length_when_max_new_tokens_is_reached() -> None:
    async with serving() as served:
        answer = await stub_of(served).GenerateUnary(asking_whole(max_new_tokens=3))
    assert answer.outputs[0].finish_reason == pb.FINISH_REASON_LENGTH
    assert len(answer.outputs[0].token_ids) == answer.usage.generated_tokens == 3


async def test_generate_encodes_text_with_the_tokenizer() -> None:
    async with serving() as served:
        stub = stub_of(served)
        tokens = await stub.Tokenize(pb.TokenizeRequest(text="  the\tcat "))
        by_text = await stub.GenerateUnary(pb.GenerateUnaryRequest(text="  the\tcat "))
        by_ids = await stub.GenerateUnary(asking_whole(tokens.token_ids))
        ended = await stub.GenerateUnary(asking_whole([*tokens.token_ids, EOS_ID]))
    assert by_text.outputs == by_ids.outputs == ended.outputs
    assert by_text.usage.source_tokens == ended.usage.source_tokens == len(tokens.token_ids) + 1


async def test_generate_reports_the_seed_that_repeats_its_tokens() -> None:
    async with serving() as served:
        stub = stub_of(served)
        first = await stub.GenerateUnary(asking_whole(temperature=5.0))
        again = await stub.GenerateUnary(asking_whole(temperature=5.0, seed=first.seed))
        other = await stub.GenerateUnary(asking_whole(temperature=5.0))
    assert first.HasField("seed")
    assert again.outputs == first.outputs
    assert other.seed != first.seed


async def test_tokenize_round_trips_to_the_normalised_text() -> None:
    async with serving() as served:
        tokens = await stub_of(served).Tokenize(pb.TokenizeRequest(text=" eine \n Brücke "))
        text = await stub_of(served).Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
    assert text.text == tokens.normalized_text == "eine Brücke"


async def test_get_model_returns_the_description_of_list_models() -> None:
    async with serving() as served:
        by_default = await stub_of(served).GetModel(pb.GetModelRequest())
        by_name = await stub_of(served).GetModel(pb.GetModelRequest(model=MODEL_NAME))
        listed = await stub_of(served).ListModels(pb.ListModelsRequest())
    assert [by_default.model] == [by_name.model] == list(listed.models)
    assert by_name.model.limits.max_source_len == served.runner.facts.max_source_len
    assert by_name.model.default_options.HasField("temperature")


BAD_REQUESTS: list[tuple[dict[str, Any], str, str]] = [
    (dict(text=""), "text", "empty"),
    (dict(text=" \t\n"), "text", "empty"),
    (dict(), "source", "text or token_ids"),
    (dict(token_ids=pb.TokenIds()), "token_ids", "empty"),
    (dict(text="x" * 100), "text", r"tokens long.* 1 to 32 tokens"),
    (dict(text="x" * 5000), "text", r"tokens long.* 1 to 32 tokens"),
    (dict(token_ids=pb.TokenIds(ids=[5] * 32)), "token_ids", r"33 tokens long.* 1 to 32 tokens"),
    (dict(token_ids=pb.TokenIds(ids=[5, 280])), "token_ids", r"280.* 0 to 279"),
    (dict(text="a", options=pb.GenerateOptions(top_p=2)), "options.top_p", r"2\.0.* at most 1"),
    (dict(text="a", options=pb.GenerateOptions(top_p=0)), "options.top_p", "above 0"),
    (dict(text="a", options=pb.GenerateOptions(top_k=-1)), "options.top_k", "-1"),
    (dict(text="a", options=pb.GenerateOptions(temperature=-0.1)), "options.temperature", "-0.1"),
    (dict(text="a", options=pb.GenerateOptions(temperature=float("nan"))), "options.temperature", "nan"),
    (dict(text="a", options=pb.GenerateOptions(max_new_tokens=-3)), "options.max_new_tokens", "-3.* at least 1"),
    (dict(text="a", options=pb.GenerateOptions(max_new_tokens=0)), "options.max_new_tokens", "at least 1"),
    (dict(text="a", options=pb.GenerateOptions(time_limit_millis=0)), "options.time_limit_millis", "0.* at least 1"),
    (dict(text="a", options=pb.GenerateOptions(beam_width=17)), "options.beam_width", "17.* 1 and 16"),
    (dict(text="a", options=pb.GenerateOptions(beam_width=9)), "options.beam_width", "9.* at most 8"),
    (dict(text="a", options=pb.GenerateOptions(beam_width=2, temperature=1)), "options.temperature", "beam_width is"),
    (dict(text="a", options=pb.GenerateOptions(beam_width=2, stop_strings=["x"])), "options.stop_strings", "above 1"),
    (dict(text="a", options=pb.GenerateOptions(num_return_sequences=2)), "options.num_return_sequences", "is 0"),
    (
        dict(text="a", options=pb.GenerateOptions(temperature=1, num_return_sequences=9)),
        "options.num_return_sequences",
        "at most 8",
    ),
    (dict(text="a", options=pb.GenerateOptions(early_stopping=9)), "options.early_stopping", "9.* EarlyStopping"),  # type: ignore[arg-type]
    (dict(text="a", options=pb.GenerateOptions(logit_bias={3: float("nan")})), "options.logit_bias", "nan for .* 3"),
    (dict(text="a", options=pb.GenerateOptions(logit_bias={280: 1.0})), "options.logit_bias", "280.* 0 to 279"),
    (dict(text="a", options=pb.GenerateOptions(suppressed_ids=[280])), "options.suppressed_ids", "280"),
    (dict(text="a", options=pb.GenerateOptions(allowed_ids=[280])), "options.allowed_ids", "280"),
    (dict(text="a", options=pb.GenerateOptions(stop_ids=[280])), "options.stop_ids", "280"),
    (dict(text="a", options=pb.GenerateOptions(stop_ids=[5] * 17)), "options.stop_ids", "17 entries"),
    (dict(text="a", options=pb.GenerateOptions(forced_first_id=280)), "options.forced_first_id", "280"),
    (dict(text="a", options=pb.GenerateOptions(stop_strings=[""])), "options.stop_strings", "1 to 256"),
    (dict(text="a", options=pb.GenerateOptions(num_logprobs=21)), "options.num_logprobs", "21.* 0 and 20"),
    (dict(text="a", options=pb.GenerateOptions(prefix_text="x" * 5000)), "options.prefix_text", "0 to 31 tokens"),
    (dict(text="a", options=pb.GenerateOptions(prefix_text="x" * 40)), "options.prefix_text", "0 to 31 tokens"),
    (
        dict(text="a", options=pb.GenerateOptions(prefix_ids=pb.TokenIds(ids=[5] * 32))),
        "options.prefix_ids",
        "0 to 31 tokens",
    ),
    (dict(text="a", options=pb.GenerateOptions(prefix_ids=pb.TokenIds(ids=[280]))), "options.prefix_ids", "280"),
    (
        dict(text="a", options=pb.GenerateOptions(prefix_ids=pb.TokenIds(ids=[5, EOS_ID]))),
        "options.prefix_ids",
        "the end token 2",
    ),
    (
        dict(text="a", options=pb.GenerateOptions(prefix_ids=pb.TokenIds(ids=[1, 5]))),
        "options.prefix_ids",
        "the begin token 1",
    ),
    (
        dict(text="a", options=pb.GenerateOptions(prefix_ids=pb.TokenIds(ids=[5, 0]))),
        "options.prefix_ids",
        "the padding token 0",
    ),
    (
        dict(text="a", options=pb.GenerateOptions(prefix_text="", prefix_ids=pb.TokenIds())),
        "options.prefix_ids",
        "absent if prefix_text is set",
    ),
]


@pytest.mark.parametrize(("fields", "field", "message"), BAD_REQUESTS)
async def test_generate_names_the_field_when_a_request_is_bad(fields: Any, field: str, message: str) -> None:
    async with serving() as served:
        stub = stub_of(served)
        calls = (stub.Generate(pb.GenerateRequest(**fields)), stub.GenerateUnary(pb.GenerateUnaryRequest(**fields)))
        for error in [await refusal(call) for call in calls]:
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert details_of(error) == Details(
                reason="INVALID_FIELD", domain="antiphon", field=field, retry_after_s=None
            )
            with pytest.raises(AssertionError, match=message):
                raise AssertionError(error.details())
        assert (await stub.GenerateUnary(asking_whole())).outputs


async def test_generate_refuses_a_very_long_source_without_tokenising_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a text of a megabyte kept the interpreter lock for seconds while its tokens were counted."""
    async with serving() as served:
        tokenised: list[object] = []
        for name in ("encode", "encode_batch"):
            monkeypatch.setattr(served.tokenizer, name, tokenised.append)
        stub = stub_of(served)
        for text in ("x" * 900_000, "wort " * 180_000):
            error = await refusal(stub.GenerateUnary(pb.GenerateUnaryRequest(text=text)))
            assert (error.code(), details_of(error).field) == (grpc.StatusCode.INVALID_ARGUMENT, "text")
        error = await refusal(stub.Generate(asking([5] * 300_000)))
        assert (error.code(), details_of(error).field) == (grpc.StatusCode.INVALID_ARGUMENT, "token_ids")
        assert not tokenised


async def test_generate_accepts_a_short_text_among_many_spaces() -> None:
    async with serving() as served:
        padded = await stub_of(served).GenerateUnary(pb.GenerateUnaryRequest(text="cat" + " " * 60_000 + "sat"))
        plain = await stub_of(served).GenerateUnary(pb.GenerateUnaryRequest(text="cat sat"))
    assert padded.outputs == plain.outputs


async def test_detokenize_returns_a_long_text() -> None:
    async with serving() as served:
        stub = stub_of(served)
        tokens = await stub.Tokenize(pb.TokenizeRequest(text="the cat " * 3000))
        text = await stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
    assert text.text == tokens.normalized_text == ("the cat " * 3000).strip()


@pytest.mark.parametrize("num_copies", [1, 3000])
async def test_detokenize_returns_the_piece_of_each_token(num_copies: int) -> None:
    async with serving() as served:
        words = served.tokenizer.encode("the kühle")
        answer = await stub_of(served).Detokenize(pb.DetokenizeRequest(token_ids=[BOS_ID, *words, EOS_ID] * num_copies))
    pieces = list(answer.pieces)
    assert len(pieces) == num_copies * (len(words) + 2)
    assert (pieces[0], pieces[-1]) == ("<s>", "</s>")
    assert pieces[1].startswith(" ")
    assert pieces == [served.tokenizer.piece(token_id) for token_id in [BOS_ID, *words, EOS_ID] * num_copies]


async def test_detokenize_names_the_id_when_it_is_not_in_the_vocabulary() -> None:
    async with serving() as served:
        error = await refusal(stub_of(served).Detokenize(pb.DetokenizeRequest(token_ids=[5, 999])))
    assert (error.code(), details_of(error).field) == (grpc.StatusCode.INVALID_ARGUMENT, "token_ids")
    assert "999" in (error.details() or "")


async def test_every_rpc_refuses_an_unknown_model() -> None:
    async with serving() as served:
        stub, name = stub_of(served), "nope"
        for call in (
            stub.Generate(pb.GenerateRequest(model=name, text="a")),
            stub.GenerateUnary(pb.GenerateUnaryRequest(model=name, text="a")),
            stub.Tokenize(pb.TokenizeRequest(model=name)),
            stub.Detokenize(pb.DetokenizeRequest(model=name)),
            stub.GetModel(pb.GetModelRequest(model=name)),
        ):
            error = await refusal(call)
            assert (error.code(), details_of(error).reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
            assert "'nope'" in (error.details() or "")
            assert f"'{MODEL_NAME}'" in (error.details() or "")


@pytest.mark.parametrize(
    ("method", "data", "field"),
    [
        ("GenerateUnary", b"\x12\x03a\xffb", "text"),
        ("GenerateUnary", b"\x0a\x01\xc3\x12\x01a", "model"),
        ("Tokenize", b"\x12\x02\xed\xa0", "text"),
        ("Score", b"\x22\x01\xff", "target_text"),
        ("GenerateUnary", b"\x22\x05\xc2\x02\x02\xed\xa0", "options.prefix_text"),
        ("GenerateUnary", b"\x12\x01a\x22\x04\xf2\x02\x01\xff", "options.stop_strings"),
        ("GenerateUnary", b"\x22\x04\xf2\x02\x09\xff", "message"),
        ("GenerateUnary", b"\x12\x7fshort", "message"),
        ("GetModel", b"\xff\xff\xff", "message"),
    ],
)
async def test_rpc_names_the_field_when_bytes_are_not_utf8_or_no_message(method: str, data: bytes, field: str) -> None:
    async with serving() as served:
        call: Any = served.channel.unary_unary(f"/antiphon.v1.InferenceService/{method}")
        error = await refusal(call(data))
        assert (error.code(), details_of(error).field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
        streamed: Any = served.channel.unary_stream("/antiphon.v1.InferenceService/Generate")
        error = await refusal(streamed(b"\x12\x01\xff"))
        assert (error.code(), details_of(error).field) == (grpc.StatusCode.INVALID_ARGUMENT, "text")
        assert (await stub_of(served).GenerateUnary(asking_whole())).outputs


async def test_rpc_refuses_a_message_over_the_limit_and_the_server_continues() -> None:
    async with serving() as served:
        error = await refusal(stub_of(served).GenerateUnary(pb.GenerateUnaryRequest(text="x" * 5_000_000)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in (error.details() or "")
        assert (await stub_of(served).GenerateUnary(asking_whole())).outputs


async def test_generate_pushes_back_when_the_queue_is_full() -> None:
    async with serving(EngineLimits(max_num_seqs=1, max_queued_requests=1)) as served:
        gate = Gate(served.runner)
        running = asyncio.ensure_future(stub_of(served).GenerateUnary(asking_whole()))
        await asyncio.to_thread(gate.reached.wait, 60)
        # One of the three waits; the other two find the queue full.
        pending = {asyncio.ensure_future(stub_of(served).GenerateUnary(asking_whole())) for _ in range(3)}
        errors: list[BaseException | None] = []
        while len(errors) < 2:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            errors += [call.exception() for call in done]
        gate.open()
        assert (await running).outputs == (await pending.pop()).outputs
    for error in errors:
        assert isinstance(error, grpc.aio.AioRpcError)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = details_of(error)
        assert details.reason == "QUEUE_FULL"
        assert details.retry_after_s is not None
        assert details.retry_after_s > 0
        pushback_ms = dict(error.trailing_metadata())["grpc-retry-pushback-ms"]
        assert int(pushback_ms) == pytest.approx(details.retry_after_s * 1000, abs=1)


async def test_cancelled_stream_frees_its_blocks_within_one_step() -> None:
    async with serving() as served:
        gate = Gate(served.runner)
        call = stub_of(served).Generate(asking((30, 30)))
        await asyncio.to_thread(gate.reached.wait, 60)
        call.cancel()
        await served.calls.wait_until_idle()
        gate.open()
        assert await asyncio.to_thread(served.engine.drain, 60)
        assert len(served.runner.decoded_rows) == 1
        assert served.engine.num_free_blocks == served.engine.num_blocks


async def test_deadline_ends_the_request_and_frees_its_blocks() -> None:
    async with serving() as served:
        gate = Gate(served.runner)
        error = await refusal(stub_of(served).GenerateUnary(asking_whole((30, 30)), timeout=0.2))
        await served.calls.wait_until_idle()
        gate.open()
        assert await asyncio.to_thread(served.engine.drain, 60)
        assert len(served.runner.decoded_rows) <= 1
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_draining_server_refuses_new_requests_and_finishes_the_running_one() -> None:
    async with serving() as served:
        gate = Gate(served.runner)
        running = asyncio.ensure_future(stub_of(served).GenerateUnary(asking_whole()))
        await asyncio.to_thread(gate.reached.wait, 60)
        draining = asyncio.ensure_future(asyncio.to_thread(served.engine.drain, 60))
        error = await _refused_as_unavailable(stub_of(served))
        gate.open()
        assert (await running).outputs[0].finish_reason == pb.FINISH_REASON_STOP
        assert await draining
    assert details_of(error).reason == "UNAVAILABLE"


async def _refused_as_unavailable(stub: InferenceServiceAsyncStub) -> grpc.aio.AioRpcError:
    """Send requests until the drain has begun. Requests accepted before are cancelled."""
    while True:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GenerateUnary(asking_whole(), timeout=0.05)
        if caught.value.code() is grpc.StatusCode.UNAVAILABLE:
            return caught.value


async def test_model_fault_ends_its_requests_as_internal_and_the_server_continues() -> None:
    async with serving() as served:
        stub = stub_of(served)

        def fail(num_rows: int) -> None:
            raise RuntimeError("secret detail")

        served.runner.before_decode = fail
        error = await refusal(stub.GenerateUnary(asking_whole()))
        streamed = await refusal(stub.Generate(asking()))
        served.runner.before_decode = lambda num_rows: None
        assert (await stub.GenerateUnary(asking_whole())).outputs
    for failed in (error, streamed):
        assert (failed.code(), details_of(failed).reason) == (grpc.StatusCode.INTERNAL, "ENGINE_FAULT")
        assert "secret" not in (failed.details() or "")


async def test_other_requests_are_unaffected_by_refused_and_cancelled_ones() -> None:
    async with serving() as served:
        stub = stub_of(served)
        sources = [(3 + i % 20, 40 + i) for i in range(24)]
        good = [asyncio.ensure_future(stub.GenerateUnary(asking_whole(ids))) for ids in sources]
        bad = [refusal(stub.GenerateUnary(pb.GenerateUnaryRequest(**fields))) for fields, _, _ in BAD_REQUESTS]
        dropped = [stub.Generate(asking((25, 25))) for _ in range(8)]
        for call in dropped:
            call.cancel()
        answers, _ = await asyncio.gather(asyncio.gather(*good), asyncio.gather(*bad))
        expected = [served.runner.answer((*ids, EOS_ID))[0] for ids in sources]
    assert [list(answer.outputs[0].token_ids) for answer in answers] == expected
