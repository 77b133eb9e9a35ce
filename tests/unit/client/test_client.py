"""The typed client, asynchronous and synchronous, with a real server over a fake model."""

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest

from antiphon.client import AsyncClient, Client, Generation, Options, ServerError, TokenLogprob
from antiphon.client.messages import as_delta, as_generations
from antiphon.client.options import options_message
from antiphon.controls.control import Kind
from antiphon.controls.table import CONTROLS
from antiphon.domain.limits import EngineLimits
from antiphon.v1 import inference_pb2 as pb
from tests.fakes import EOS_ID
from tests.refusing import recording
from tests.serving import Gate, fake_scorer, serving

SOURCES = [(3 + i % 20, 40 + i) for i in range(20)]
MALFORMED: tuple[int, ...] = ()
T = TypeVar("T")


async def in_thread(target: str, work: Callable[[Client], T], **given: Any) -> T:
    """Return the result of some work with the synchronous client."""

    def run() -> T:
        with Client(target, **given) as client:
            return work(client)

    return await asyncio.to_thread(run)


async def test_async_client_streams_the_text_of_the_unary_answer() -> None:
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
    def ask(client: Client) -> tuple[str, Generation, list[Generation | ServerError]]:
        streamed = "".join(delta.text for delta in client.generate(SOURCES[3]))
        return streamed, client.generate_text(SOURCES[3]), list(client.generate_many(SOURCES, concurrency=4))

    async with serving() as served, AsyncClient(served.target) as client:
        streamed, whole, many = await in_thread(served.target, ask)
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


async def test_client_distinguishes_options_of_zero_from_absent_ones() -> None:
    async with serving() as served, AsyncClient(served.target) as client:
        with pytest.raises(ServerError, match=r"options\.max_new_tokens is 0") as caught:
            await client.generate_text(SOURCES[0], Options(max_new_tokens=0))
        seeded = await client.generate_text(SOURCES[0], Options(temperature=1.0, seed=0))
    assert caught.value.field == "options.max_new_tokens"
    assert seeded.seed == 0


async def test_client_names_the_option_whose_value_does_not_fit_its_field() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=r"options\.seed is -1"):
            await client.generate_text("a", Options(seed=-1))


def test_options_have_a_field_for_every_field_of_the_contract() -> None:
    assert {field.name for field in dataclasses.fields(Options)} == set(pb.GenerateOptions.DESCRIPTOR.fields_by_name)


# For each kind of control a value that is false, which must not count as absent, and another value.
VALUES: dict[Kind, tuple[Any, Any]] = {
    Kind.WHOLE_NUMBER: (0, 5),
    Kind.NUMBER: (0.0, -1.5),
    Kind.SWITCH: (False, True),
    Kind.CHOICE: ("heuristic", "never"),
    Kind.TOKEN_ID: (0, 7),
    Kind.TOKEN_IDS: ((), [7, 8]),
    Kind.BIASES: ({}, {5: 1.5, 6: -2.0}),
    Kind.TEXT: ("", "yz"),
    Kind.TEXTS: ((), ["x", "yz"]),
}


@pytest.mark.parametrize("which", [0, 1])
def test_options_become_the_contracts_fields_one_by_one(which: int) -> None:
    options = Options(**{control.name: VALUES[control.kind][which] for control in CONTROLS})
    message = options_message(options)
    assert message is not None
    for field in dataclasses.fields(Options):
        given = getattr(options, field.name)
        sent = getattr(message, field.name)
        if pb.GenerateOptions.DESCRIPTOR.fields_by_name[field.name].has_presence:
            assert message.HasField(field.name)  # type: ignore[arg-type]
        if field.name == "prefix_ids":
            sent = sent.ids
        if field.name == "early_stopping":
            given = (pb.EARLY_STOPPING_HEURISTIC, pb.EARLY_STOPPING_NEVER)[which]
        assert (dict(sent) if isinstance(given, dict) else type(given)(sent)) == given


def test_options_that_are_none_are_absent() -> None:
    assert not options_message(Options()).ListFields()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_strings", "abc"),
        ("stop_strings", [5]),
        ("stop_ids", "12"),
        ("suppressed_ids", [-1]),
        ("allowed_ids", 5),
        ("prefix_ids", "12"),
        ("logit_bias", [5]),
        ("logit_bias", {-1: 1.0}),
        ("early_stopping", "sometimes"),
        ("beam_width", "4"),
        ("ignore_eos", "no"),
        ("prefix_text", "\udcff"),
    ],
)
async def test_client_names_the_option_whose_value_has_another_type(field: str, value: Any) -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ValueError, match=rf"^options\.{field} is "):
            await client.generate_text("a", Options(**{field: value}))


async def test_generate_outputs_gives_every_output_and_generate_text_the_best() -> None:
    options = Options(beam_width=4, num_return_sequences=3, num_logprobs=0, seed=1)

    def ask(client: Client) -> tuple[list[Generation], Generation]:
        return client.generate_outputs(SOURCES[3], options), client.generate_text(SOURCES[3], options)

    async with serving() as served, AsyncClient(served.target) as client:
        outputs = await client.generate_outputs(SOURCES[3], options)
        best = await client.generate_text(SOURCES[3], options)
        deltas = [delta async for delta in client.generate(SOURCES[3], options)]
        synchronous, synchronous_best = await in_thread(served.target, ask)
    assert [output.output_index for output in outputs] == [0, 1, 2]
    scores = [output.score or 0.0 for output in outputs]
    assert scores == sorted(scores, reverse=True)
    assert [output.text for output in outputs] == [output.text for output in synchronous]
    assert outputs[0].text == best.text == synchronous_best.text
    assert [delta.score for delta in deltas if delta.finish_reason] == scores
    ended = outputs[0].finish_reason == "stop"
    assert [entry.token_id for entry in outputs[0].logprobs] == [*outputs[0].token_ids, *[EOS_ID][: int(ended)]]


async def test_score_and_embed_agree_between_the_clients() -> None:
    def ask(client: Client) -> tuple[Any, ...]:
        scored = client.score(SOURCES[3], "the cat", num_alternatives=2)
        return scored.logprobs, scored.score, client.embed(SOURCES[3], pooling="max", normalize=True).vector

    async with serving() as served, AsyncClient(served.target) as client:
        scored = await client.score(SOURCES[3], served.tokenizer.encode("the cat"), num_alternatives=2)
        embedding = await client.embed(SOURCES[3], pooling="max", normalize=True)
        synchronous = await in_thread(served.target, ask)
        states = served.runner.memory((*SOURCES[3], EOS_ID))
        with pytest.raises(ValueError, match="mean, max, first"):
            await client.embed("a", pooling="median")  # type: ignore[arg-type]
    assert synchronous == (scored.logprobs, scored.score, embedding.vector)
    assert isinstance(scored.logprobs[0], TokenLogprob)
    assert [len(entry.alternatives) for entry in scored.logprobs] == [2] * len(scored.logprobs)
    assert scored.score == pytest.approx(sum(entry.logprob for entry in scored.logprobs))
    expected = states.max(axis=0)
    assert embedding.vector == pytest.approx(expected / np.linalg.norm(expected), abs=1e-6)


async def test_next_token_and_tokens_agree_between_the_clients() -> None:
    options = Options(temperature=0.7, top_k=5, suppressed_ids=[60])

    def ask(client: Client) -> tuple[Any, ...]:
        tokens = client.tokenize("the cat ")
        following = client.next_token(SOURCES[3], options, generated_ids=[50], num_tokens=3)
        return following, tokens, client.detokenize(tokens.token_ids)

    async with serving(scorer=fake_scorer()) as served, AsyncClient(served.target) as client:
        following = await client.next_token(SOURCES[3], options, generated_ids=[50], num_tokens=3)
        tokens = await client.tokenize("the cat ")
        text = await client.detokenize(tokens.token_ids)
        synchronous = await in_thread(served.target, ask)
        logits = served.runner.logits((*SOURCES[3], EOS_ID), 1)
    assert synchronous == (following, tokens, text)
    assert (text.text, tokens.normalized_text) == ("the cat", "the cat")
    assert "".join(text.pieces) == " the cat"
    assert list(following.token_ids[:3]) == np.argsort(-logits)[:3].tolist()
    assert following.stages[0].logprobs[0] == pytest.approx(logits.max() - np.log(np.exp(logits).sum()), abs=1e-5)
    assert [stage.name for stage in following.stages] == [
        "model", "logits_processors", "temperature", "top_k", "top_p", "min_p", "typical_p"
    ]  # fmt: skip
    assert [stage.num_kept for stage in following.stages[3:]] == [5] * 4


async def test_explain_returns_maps_beyond_grpcs_default_message_limit() -> None:
    async with serving(explainer=LargeExplainer()) as served, AsyncClient(served.target) as client:
        by_text = await client.explain(SOURCES[3], "the cat")
        synchronous = await in_thread(served.target, lambda client: client.explain(SOURCES[3], "the cat"))
    assert by_text.ByteSize() > 4 * 2**20
    assert by_text == synchronous


async def test_get_positions_returns_each_part_of_the_model() -> None:
    async with serving() as served, AsyncClient(served.target) as client:
        found = await client.get_positions(5)
        synchronous = await in_thread(served.target, lambda client: client.get_positions(5))
        with pytest.raises(ServerError, match="num_positions is 65; it must be 0 to 64"):
            await client.get_positions(num_positions=65)
    assert found == synchronous
    assert [(each.part, each.rows) for each in found] == [(pb.ARCHITECTURE_ENCODER, 5), (pb.ARCHITECTURE_DECODER, 5)]


class LargeExplainer:
    """Returns far more weights than the texts need."""

    def explain(
        self, source_ids: Sequence[int] = (), target_ids: Sequence[int] = (), type_ids: Sequence[int] = ()
    ) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        return dict.fromkeys(("encoder_self", "decoder_self", "cross"), np.full((1, 2, 500, 1000), 1e-3, np.float32))

    def longest_target(self, source_len: int) -> int:
        return 1000


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (Options(max_new_tokens=2), "length"),
        (Options(), "stop"),
        (Options(forced_first_id=60, stop_ids=[60]), "stop_sequence"),
        (Options(allowed_ids=[40], suppressed_ids=[40], ignore_eos=True), "exhausted"),
    ],
)
async def test_client_names_every_finish_reason(options: Options, reason: str) -> None:
    async with serving() as served, AsyncClient(served.target) as client:
        assert (await client.generate_text(SOURCES[8], options)).finish_reason == reason


async def test_leaving_a_stream_cancels_its_work() -> None:
    async with serving() as served, AsyncClient(served.target) as client:
        stream = client.generate((30, 30))
        async for _ in stream:
            break
        await stream.aclose()
        await served.calls.wait_until_idle()
        assert await asyncio.to_thread(served.engine.drain, 60)
        assert len(served.runner.decoded_rows) <= 31


async def test_client_retries_after_pushback_when_the_queue_was_full() -> None:
    config = EngineLimits(max_num_seqs=1, max_queued_requests=1)
    async with serving(config) as served, AsyncClient(served.target) as client:
        gate = Gate(served.runner)
        calls = [asyncio.ensure_future(client.generate_text(SOURCES[0])) for _ in range(3)]
        await asyncio.to_thread(gate.reached.wait, 60)
        gate.open()
        answers = await asyncio.gather(*calls)
    assert len({answer.text for answer in answers}) == 1


async def test_client_sends_its_timeout_as_the_deadline() -> None:
    async with serving() as served, AsyncClient(served.target) as client:
        gate = Gate(served.runner)
        with pytest.raises(ServerError) as caught:
            await client.generate_text(SOURCES[0], timeout_s=0.1)
        gate.open()
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_client_reports_unavailable_when_no_server_listens() -> None:
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(ServerError) as caught:
            await client.get_model()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE


async def test_client_with_another_model_asks_for_it_over_the_same_connection() -> None:
    async with recording() as (target, recorded), AsyncClient(target, model="one") as client:
        await client.with_model("other").generate_text("a")
        await client.generate_text("a")
        assert [request.model for request in recorded.requests] == ["other", "one"]
        await in_thread(
            target, lambda one: [ask.generate_text("a") for ask in (one.with_model("other"), one)], model="one"
        )
        assert [request.model for request in recorded.requests[2:]] == ["other", "one"]


async def test_get_model_reports_the_limits() -> None:
    async with serving() as served, AsyncClient(served.target) as client:
        model = await client.get_model()
        synchronous = await in_thread(served.target, lambda client: client.get_model().name)
    assert model.limits.max_source_len == served.runner.facts.max_source_len
    assert synchronous == model.name


def test_client_loads_nothing_but_grpcio_and_protobuf() -> None:
    code = "import sys, antiphon.client, antiphon.cli.generate, antiphon.cli.main; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    ours = {name.split(".")[1] for name in loaded if name.startswith("antiphon.")}
    assert ours <= {"cli", "client", "controls", "v1"}
    assert {"google.rpc", "numpy", "onnxruntime", "prometheus_client"}.isdisjoint(loaded)
    assert {"pydantic", "tokenizers", "torch", "tqdm", "uvloop"}.isdisjoint(loaded)


def text_of(result: Generation | ServerError) -> str:
    assert isinstance(result, Generation)
    return result.text


def test_client_accepts_an_unknown_finish_reason_of_a_newer_server() -> None:
    newer = pb.GenerateResponse.FromString(b"\x20\x63")  # finish_reason: 99
    assert as_delta(newer).finish_reason == "unknown"
    whole = pb.GenerateUnaryResponse(outputs=[pb.Output.FromString(b"\x20\x63")])
    assert as_generations(whole)[0].finish_reason == "unknown"
