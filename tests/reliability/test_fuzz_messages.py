"""Random messages to every RPC of the real servicer over real gRPC: no crash, no hang, one terminal event."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.engine.remote import AnyEngine
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.v1 import inference_pb2 as pb
from tests.bundle_serving import serving_bundle
from tests.reliability.answers import check_many, check_refusal, check_stream
from tests.reliability.background import Background
from tests.reliability.sizes import size
from tests.reliability.wire import messages
from tests.serving import fake_scorer, serving

pytestmark = pytest.mark.hardship

NUM_EXAMPLES = size("FUZZ_EXAMPLES", 30)
# The shipped bundle takes tens of milliseconds for each call.
NUM_BUNDLE_EXAMPLES = size("FUZZ_BUNDLE_EXAMPLES", 5)
# Much longer than the longest answer: turns a hang into a failure.
PATIENCE_S = 60
METHODS = {method.name: method for method in pb.DESCRIPTOR.services_by_name["InferenceService"].methods}
# Mostly the default model, because a random name is only refused as unknown.
_NAMES = st.sampled_from([b"", b"", b"", b"", b"", b"", b"", b"nobody", b"\xff"])
GIVEN = {"model": _NAMES, "source_language": _NAMES, "target_language": _NAMES}

Served = tuple[grpc.Channel, AnyEngine]


@pytest.fixture(scope="module")
def fake() -> Iterator[Served]:
    with (
        Background(lambda: serving(scorer=fake_scorer())) as server,
        grpc.insecure_channel(server.served.target) as channel,
    ):
        yield channel, server.served.engine


@pytest.fixture(scope="module")
def shipped() -> Iterator[Served]:
    with (
        Background(lambda: serving_bundle(SHIPPED_BUNDLE, max_num_seqs=8)) as server,
        grpc.insecure_channel(server.served.target) as channel,
    ):
        yield channel, server.served.served.engine


def fuzzed(num_examples: int) -> Callable[[Any], Any]:
    """Return Hypothesis settings: few examples are the same in every run, many differ between runs."""
    return settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=num_examples < 200,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def call(channel: grpc.Channel, method: MethodDescriptor, data: bytes) -> None:
    """Send bytes to a method and check that the result is a valid answer or refusal."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    parse = GetMessageClass(method.output_type).FromString
    make: Any = channel.unary_stream if method.server_streaming else channel.unary_unary
    if method.client_streaming:
        make = channel.stream_stream
    ask = make(path, response_deserializer=parse)
    try:
        answer = ask(iter([data]) if method.client_streaming else data, timeout=PATIENCE_S)
        if method.client_streaming:
            responses = list(answer)  # the data may be no message
            check_many(pb.GenerateManyRequest.FromString(data), responses)
        elif method.server_streaming:
            check_stream(list(answer))
    except grpc.RpcError as error:
        check_refusal(error, method.input_type)


def check_random_messages(served: Served, method: MethodDescriptor, num_examples: int) -> None:
    """Check that each message is answered or refused, and that afterwards nothing runs and every block is free."""
    channel, engine = served

    @fuzzed(num_examples)
    @given(messages(method.input_type, GIVEN))
    def holds(data: bytes) -> None:
        call(channel, method, data)

    holds()
    assert (engine.num_running, engine.num_free_blocks) == (0, engine.num_blocks)


@pytest.mark.parametrize("name", METHODS)
def test_random_messages_get_one_answer_or_one_refusal(fake: Served, name: str) -> None:
    check_random_messages(fake, METHODS[name], NUM_EXAMPLES)


@pytest.mark.parametrize("name", METHODS)
def test_random_messages_get_one_answer_or_one_refusal_from_the_shipped_model(shipped: Served, name: str) -> None:
    check_random_messages(shipped, METHODS[name], NUM_BUNDLE_EXAMPLES)
