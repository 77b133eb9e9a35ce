"""The table of limits, tested below, at and above each limit, over gRPC with the shipped model."""

from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message_factory import GetMessageClass

from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.text.tokenizer import Tokenizer
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.bundle_serving import serving_bundle
from tests.reliability.answers import violation_of
from tests.reliability.background import Background
from tests.reliability.limits import (
    EOS_ID,
    MAX_SOURCE_LEN,
    MAX_TARGET_LEN,
    MODEL,
    OPTIONS,
    REQUESTS,
    ROWS,
    VOCABULARY,
    text_of,
)
from tests.serving import asking_whole, serving, stub_of

pytestmark = pytest.mark.hardship

# Requests of GenerateMany are those of Generate.
METHODS = {
    method.input_type.name: method
    for method in pb.DESCRIPTOR.services_by_name["InferenceService"].methods
    if not method.client_streaming
}
# The shipped model has no head for these; test_limits_of_encoders.py tests them.
ENCODER = {"ClassifyRequest", "TagRequest", "FillMaskRequest"}
FIELDS = [(name, field) for name, ask in REQUESTS.items() for field in ask.fields]
PATIENCE_S = 60


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    with Background(lambda: serving_bundle(SHIPPED_BUNDLE, max_num_seqs=ROWS)) as server:
        options = [("grpc.max_receive_message_length", -1)]  # attention maps
        with grpc.insecure_channel(server.served.target, options=options) as channel:
            yield channel


def outcome(channel: grpc.Channel, kind: str, fields: dict[str, Any]) -> str | None:
    """Return None for an answer, the named field for INVALID_ARGUMENT, or another status."""
    method = METHODS[kind]
    request = GetMessageClass(method.input_type)(**fields)
    make: Any = channel.unary_stream if method.server_streaming else channel.unary_unary
    ask = make(
        f"/antiphon.v1.InferenceService/{method.name}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    try:
        answer = ask(request, timeout=PATIENCE_S)
        if method.server_streaming:
            assert list(answer)
        return None
    except grpc.RpcError as error:
        return violation_of(error)


def test_tables_of_limits_match_the_model() -> None:
    tokenizer = Tokenizer.load(SHIPPED_BUNDLE / "tokenizer.json")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (VOCABULARY, EOS_ID)
    for count in (1, MAX_SOURCE_LEN - 1, MAX_TARGET_LEN):
        assert len(tokenizer.encode(text_of(count))) == len(tokenizer.encode_target(text_of(count))) == count


def test_every_field_of_the_contract_has_its_limits() -> None:
    assert set(METHODS) == set(REQUESTS) | ENCODER
    for name, ask in REQUESTS.items():
        assert set(METHODS[name].input_type.fields_by_name) - {"model"} == set(ask.fields)
    assert set(pb.GenerateOptions.DESCRIPTOR.fields_by_name) == set(OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_accepted_up_to_their_limits_and_refused_beyond(channel: grpc.Channel, name: str) -> None:
    limit = OPTIONS[name]

    def ask(value: Any) -> str | None:
        options = {"max_new_tokens": 2, **limit.beside, name: value}
        return outcome(channel, "GenerateUnaryRequest", {"text": "How are you?", "options": options})

    assert {repr(value)[:80]: ask(value) for value in limit.taken} == {repr(value)[:80]: None for value in limit.taken}
    for value in limit.refused:
        assert ask(value) == f"options.{name}", value


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_fields_are_accepted_up_to_their_limits_and_refused_beyond(channel: grpc.Channel, kind: str, name: str) -> None:
    ask, limit = REQUESTS[kind], REQUESTS[kind].fields[name]
    for value in limit.taken:
        assert outcome(channel, kind, {**without_rivals(kind, ask.base, name), name: value}) is None, str(value)[:80]
    for value in limit.refused:
        blamed = outcome(channel, kind, {**without_rivals(kind, ask.base, name), name: value})
        assert blamed in (name, f"{name}.ids"), str(value)[:80]


def outcome_among_many(channel: grpc.Channel, fields: dict[str, Any]) -> str | None:
    """Return the outcome of a request to generate that shares its call with another one, which must be answered."""
    given = pb.ManyRequest(id=1, request=pb.GenerateRequest(**fields), is_whole=True)
    other = pb.ManyRequest(id=2, request=pb.GenerateRequest(**REQUESTS["GenerateRequest"].base), is_whole=True)
    call = InferenceServiceStub(channel).GenerateMany(
        iter([pb.GenerateManyRequest(requests=[given, other])]), timeout=PATIENCE_S
    )
    answers = {answer.id: answer for response in call for answer in response.answers}
    assert answers[2].HasField("whole")
    if answers[1].HasField("whole"):
        return None
    return answers[1].failure.field or codes_by_number()[answers[1].failure.code]


def codes_by_number() -> dict[int, str]:
    return {code.value[0]: code.name for code in grpc.StatusCode}


@pytest.mark.parametrize("name", REQUESTS["GenerateRequest"].fields)
def test_fields_of_a_request_among_many_have_the_same_limits(channel: grpc.Channel, name: str) -> None:
    ask = REQUESTS["GenerateRequest"]
    for value in ask.fields[name].taken:
        fields = {**without_rivals("GenerateRequest", ask.base, name), name: value}
        assert outcome_among_many(channel, fields) is None, str(value)[:80]
    for value in ask.fields[name].refused:
        fields = {**without_rivals("GenerateRequest", ask.base, name), name: value}
        assert outcome_among_many(channel, fields) in (name, f"{name}.ids"), str(value)[:80]


@pytest.mark.parametrize("kind", sorted(set(METHODS) - {"ListModelsRequest"}))
def test_models_are_found_by_their_exact_name(channel: grpc.Channel, kind: str) -> None:
    base = REQUESTS[kind].base if kind in REQUESTS else {"text": "x"}
    for name in MODEL.refused:
        assert outcome(channel, kind, {**base, "model": name}) == "NOT_FOUND"
    for name in MODEL.taken:
        assert outcome(channel, kind, {**base, "model": name}) == ("UNIMPLEMENTED" if kind in ENCODER else None)


def without_rivals(kind: str, base: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the request without the other fields of the same oneof."""
    descriptor = METHODS[kind].input_type
    oneof = descriptor.fields_by_name[name].containing_oneof
    rivals = {field.name for field in oneof.fields} if oneof else set()
    return {field: value for field, value in base.items() if field not in rivals}


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
