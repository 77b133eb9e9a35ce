"""The contract over a real channel: deltas, terminal messages, refusals, special tokens, and a client's departure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from antiphon.architecture.config import preset
from antiphon.domain.errors import DeadlineExceeded, InvalidArgument
from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import Request
from antiphon.domain.sampling_params import Controls, SamplingParams
from antiphon.engine.engine import Engine
from antiphon.engine.stream import OutputStream
from antiphon.observability.call import CallRecord
from antiphon.observability.engine_metrics import Metrics
from antiphon.observability.metrics import MetricFamilies
from antiphon.rpc.v1.inputs import Inputs, LongTexts
from antiphon.rpc.v1.languages import NO_LANGUAGES
from antiphon.rpc.v1.streaming import cancelled_on_error
from antiphon.text.format import TextFormat
from antiphon.text.tokenizer import byte_bpe_format
from antiphon.v1 import inference_pb2 as pb
from tests.fakes import BOS_ID, EOS_ID, FakeClock, FakeRunner, limits_for, request_of, source_of
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
    tiny_tokenizer,
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


BAD_OPTIONS: list[tuple[dict[str, Any], str, str]] = [
    (dict(top_p=2), "top_p", r"2\.0.* at most 1"),
    (dict(top_p=0), "top_p", "above 0"),
    (dict(top_k=-1), "top_k", "-1"),
    (dict(temperature=-0.1), "temperature", "-0.1"),
    (dict(temperature=float("nan")), "temperature", "nan"),
    (dict(max_new_tokens=-3), "max_new_tokens", "-3.* at least 1"),
    (dict(max_new_tokens=0), "max_new_tokens", "at least 1"),
    (dict(time_limit_millis=0), "time_limit_millis", "0.* at least 1"),
    (dict(beam_width=17), "beam_width", "17.* 1 and 16"),
    (dict(beam_width=9), "beam_width", "9.* at most 8"),
    (dict(beam_width=2, temperature=1), "temperature", "beam_width is"),
    (dict(beam_width=2, stop_strings=["x"]), "stop_strings", "above 1"),
    (dict(num_return_sequences=2), "num_return_sequences", "is 0"),
    (dict(temperature=1, num_return_sequences=9), "num_return_sequences", "at most 8"),
    (dict(early_stopping=9), "early_stopping", "9.* EarlyStopping"),
    (dict(logit_bias={3: float("nan")}), "logit_bias", "nan for .* 3"),
    (dict(logit_bias={280: 1.0}), "logit_bias", "280.* 0 to 279"),
    (dict(suppressed_ids=[280]), "suppressed_ids", "280"),
    (dict(allowed_ids=[280]), "allowed_ids", "280"),
    (dict(stop_ids=[280]), "stop_ids", "280"),
    (dict(stop_ids=[5] * 17), "stop_ids", "17 entries"),
    (dict(forced_first_id=280), "forced_first_id", "280"),
    (dict(stop_strings=[""]), "stop_strings", "1 to 256"),
    (dict(num_logprobs=21), "num_logprobs", "21.* 0 and 20"),
    (dict(prefix_text="x" * 5000), "prefix_text", "0 to 31 tokens"),
    (dict(prefix_text="x" * 40), "prefix_text", "0 to 31 tokens"),
    (dict(prefix_ids=pb.TokenIds(ids=[5] * 32)), "prefix_ids", "0 to 31 tokens"),
    (dict(prefix_ids=pb.TokenIds(ids=[280])), "prefix_ids", "280"),
    (dict(prefix_ids=pb.TokenIds(ids=[5, EOS_ID])), "prefix_ids", "the end token 2"),
    (dict(prefix_ids=pb.TokenIds(ids=[1, 5])), "prefix_ids", "the begin token 1"),
    (dict(prefix_ids=pb.TokenIds(ids=[5, 0])), "prefix_ids", "the padding token 0"),
    (dict(prefix_text="", prefix_ids=pb.TokenIds()), "prefix_ids", "absent if prefix_text is set"),
]
BAD_REQUESTS: list[tuple[dict[str, Any], str, str]] = [
    (dict(text=""), "text", "empty"),
    (dict(text=" \t\n"), "text", "empty"),
    (dict(), "source", "text or token_ids"),
    (dict(token_ids=pb.TokenIds()), "token_ids", "empty"),
    (dict(text="x" * 100), "text", r"tokens long.* 1 to 32 tokens"),
    (dict(text="x" * 5000), "text", r"tokens long.* 1 to 32 tokens"),
    (dict(token_ids=pb.TokenIds(ids=[5] * 32)), "token_ids", r"33 tokens long.* 1 to 32 tokens"),
    (dict(token_ids=pb.TokenIds(ids=[5, 280])), "token_ids", r"280.* 0 to 279"),
    *(
        (dict(text="a", options=pb.GenerateOptions(**options)), f"options.{name}", message)
        for options, name, message in BAD_OPTIONS
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
        ids = [BOS_ID, *served.tokenizer.encode("the kühle"), EOS_ID] * num_copies
        answer = await stub_of(served).Detokenize(pb.DetokenizeRequest(token_ids=ids))
    assert list(answer.pieces) == [served.tokenizer.piece(token_id) for token_id in ids]
    assert (answer.pieces[0], answer.pieces[-1], answer.pieces[1][0]) == ("<s>", "</s>", " ")


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


PAD, BOS, EOS = 0, 1, 2
BOS_IS_A_LANGUAGE = byte_bpe_format(tiny_tokenizer()).model_copy(update=dict(languages={"de": BOS}))


async def prefix_of(ids: tuple[int, ...], text: TextFormat | None = None, **config: Any) -> tuple[int, ...]:
    """Return the prefix of these ids in the form that the model receives."""
    tokenizer = tiny_tokenizer()
    limits = pb.Limits(max_source_len=32, max_target_len=32, max_text_bytes=1024)
    model = preset("tiny", vocab_size=tokenizer.vocab_size, **config)
    inputs = Inputs(tokenizer, text or byte_bpe_format(tokenizer), model, limits, LongTexts())
    return await inputs.prefix_ids(Controls(params=SamplingParams(), prefix_ids=ids), NO_LANGUAGES, caller="")


@pytest.mark.parametrize(
    ("ids", "config", "named"),
    [
        *(
            (ids, {}, f"options.prefix_ids is .*the {name} token {token_id}")
            for token_id, name in ((PAD, "padding"), (BOS, "begin"), (EOS, "end"))
            for ids in ((token_id,), (token_id, 30), (30, token_id))
        ),
        ((2, 30), {"bos_id": 2}, "the end token 2"),
        ((30, EOS), {"architecture": "decoder", "encoder_layers": 0}, "the end token 2"),
    ],
)
async def test_prefix_is_refused_when_it_has_a_token_that_no_target_contains(
    ids: tuple[int, ...], config: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgument, match=named):
        await prefix_of(ids, **config)


async def test_prefix_can_contain_a_language_and_any_token_of_a_prompt() -> None:
    assert await prefix_of((BOS, 30), BOS_IS_A_LANGUAGE) == (BOS, 30)
    assert await prefix_of((30, BOS, PAD), architecture="decoder", encoder_layers=0) == (30, BOS, PAD)


class Bench:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.clock = FakeClock()
        metrics = Metrics(MetricFamilies(self.registry), "fake")
        self.runner = FakeRunner()
        self.engine = Engine(self.runner, limits_for(self.runner), metrics, clock=self.clock)
        self.engine.start()

    def ask(self, *, within_s: float | None = None) -> tuple[Request, OutputStream]:
        deadline_s = None if within_s is None else self.clock() + within_s
        request = request_of("a", source_of(target_len=3), arrival_s=self.clock(), deadline_s=deadline_s)
        stream = OutputStream("a")
        self.engine.submit(request, stream)
        return request, stream

    def counted(self) -> dict[str, float]:
        """Return cancellations by cause, and deadline misses, of complete answers."""
        return {
            sample.labels.get("cause", "late"): sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.labels.get("stage") == "streaming" and sample.name.endswith("_total") and sample.value
        }


def record_of_call() -> CallRecord:
    return CallRecord(method="m", request_id="r", arrival_s=0.0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.engine.stop()
    assert bench.engine.num_free_blocks == bench.engine.num_blocks


@pytest.mark.parametrize(
    ("error", "within_s", "passed_s", "counted"),
    [
        (asyncio.CancelledError(), None, 0.0, {"client": 1.0}),
        (asyncio.CancelledError(), 10.0, 5.0, {"client": 1.0}),
        (asyncio.CancelledError(), 10.0, 10.0, {"late": 1.0}),
        (asyncio.CancelledError(), 10.0, 9.9, {"late": 1.0}),  # the client's own time limit passed first
        (grpc.aio.InternalError("the batch failed"), None, 0.0, {"client": 1.0}),
        (RuntimeError("a bug"), None, 0.0, {"fault": 1.0}),
        (DeadlineExceeded("by the engine, which has counted it"), None, 0.0, {}),
    ],
)
async def test_reading_reports_why_an_answer_was_not_read_to_its_end(
    bench: Bench, error: BaseException, within_s: float | None, passed_s: float, counted: dict[str, float]
) -> None:
    request, stream = bench.ask(within_s=within_s)

    async def leave_unread() -> None:
        with cancelled_on_error(bench.engine, request, stream, record_of_call()):
            await stream.collect()
            bench.clock.advance(passed_s)
            raise error

    with pytest.raises(type(error)):
        await leave_unread()
    assert bench.counted() == counted


async def test_reading_to_the_end_counts_nothing(bench: Bench) -> None:
    request, stream = bench.ask()
    with cancelled_on_error(bench.engine, request, stream, record_of_call()):
        await stream.collect()
    assert bench.counted() == {}


async def test_reading_counts_an_end_by_the_engine_once(bench: Bench) -> None:
    held = threading.Event()

    def hold(num_rows: int) -> None:
        assert held.wait(30)

    bench.runner.before_decode = hold
    request, stream = bench.ask(within_s=1.0)

    async def read_until_cancelled() -> None:
        with cancelled_on_error(bench.engine, request, stream, record_of_call()):
            await stream.collect()
            raise asyncio.CancelledError  # like gRPC at the same moment

    bench.clock.advance(1.0)
    held.set()
    with pytest.raises(asyncio.CancelledError):
        await read_until_cancelled()
    assert bench.counted() == {}
    assert bench.engine.drain(30)
    misses = [
        sample.value
        for family in bench.registry.collect()
        for sample in family.samples
        if sample.name == "antiphon_deadline_misses_total" and sample.value
    ]
    assert misses == [1.0]
