"""Requests that an encoder answers in its own way: limits and random messages, with a fake encoder of every head."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given

from antiphon.v1 import inference_pb2 as pb
from tests.explainers import FakeExplainer
from tests.reliability.background import Background
from tests.reliability.encoders import HEADS, MASK, VOCABULARY, encoder_requests
from tests.reliability.test_fuzz_messages import GIVEN, NUM_EXAMPLES, call, fuzzed
from tests.reliability.test_limits_of_requests import ENCODER, METHODS, outcome, without_rivals
from tests.reliability.wire import messages
from tests.serving import masked_tokenizer, serving

pytestmark = pytest.mark.hardship

MASK_ID = masked_tokenizer().mask_id or 0
REQUESTS = encoder_requests(MASK_ID)
FIELDS = [(name, field) for name, ask in REQUESTS.items() for field in ask.fields]


@pytest.fixture(scope="module")
def channel() -> Iterator[grpc.Channel]:
    with (
        Background(lambda: serving(heads=HEADS, explainer=FakeExplainer())) as server,
        grpc.insecure_channel(server.served.target) as channel,
    ):
        yield channel


def test_tables_of_limits_match_the_model_and_are_complete() -> None:
    assert (masked_tokenizer().vocab_size, masked_tokenizer().encode(MASK)) == (VOCABULARY, [MASK_ID])
    assert set(REQUESTS) == ENCODER | {"ExplainRequest"}
    for name, ask in REQUESTS.items():
        assert set(METHODS[name].input_type.fields_by_name) - {"model"} == set(ask.fields)


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_fields_are_accepted_up_to_their_limits_and_refused_beyond(channel: grpc.Channel, kind: str, name: str) -> None:
    ask, limit = REQUESTS[kind], REQUESTS[kind].fields[name]

    def sent(value: Any) -> str | None:
        return outcome(channel, kind, {**without_rivals(kind, ask.base, name), name: value})

    assert {str(value)[:60]: sent(value) for value in limit.taken} == {str(value)[:60]: None for value in limit.taken}
    for value in limit.refused:
        assert sent(value) in (limit.blamed or name, f"{name}.ids"), str(value)[:60]


@pytest.mark.parametrize("kind", sorted({*REQUESTS, "EmbedRequest"}))
def test_random_messages_get_one_answer_or_one_refusal(channel: grpc.Channel, kind: str) -> None:
    method = METHODS[kind]

    @fuzzed(NUM_EXAMPLES)
    @given(messages(method.input_type, GIVEN))
    def holds(data: bytes) -> None:
        call(channel, method, data)

    holds()
    assert pb.DESCRIPTOR.message_types_by_name[kind] is method.input_type
