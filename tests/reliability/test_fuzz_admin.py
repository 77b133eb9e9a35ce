"""Random messages to the admin port of a real server: one answer or refusal each, and models answer afterwards."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from antiphon.client import Client
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.v1 import admin_pb2
from tests.integration.process import ServerProcess
from tests.reliability.answers import REFUSALS, check_field
from tests.reliability.sizes import size
from tests.reliability.test_fuzz_messages import PATIENCE_S, fuzzed
from tests.reliability.wire import messages

pytestmark = pytest.mark.hardship

# With 40 examples, no request had a valid name and reached the handling of the path.
NUM_EXAMPLES = size("FUZZ_ADMIN_EXAMPLES", 100)
METHODS = {method.name: method for method in admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods}
# One path in six is a bundle, so that limits are tested too. The first model's name is absent: it is never unloaded.
GIVEN = {
    "name": st.sampled_from([b"", b"other", b"another", b"nobody", b"..", b"\xff"]),
    "path": st.sampled_from([b"", b"/", b"/dev/null", b"relative", b"\x00", bytes(SHIPPED_BUNDLE.resolve())]),
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(SHIPPED_BUNDLE, ["--admin-port", "0", "--max-num-seqs", "4"]) as process:
        yield process


def check_admin_refusal(error: Any, asked: Any) -> None:
    """Check a refusal as for any call; the admin service also refuses a model that exists already, or the last one."""
    assert error.code() in REFUSALS | {grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.FAILED_PRECONDITION}
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert any(detail.Unpack(info) for detail in status.details)
    assert info.reason
    if any(detail.Unpack(bad) for detail in status.details):
        check_field(bad.field_violations[0].field, asked)


@pytest.mark.parametrize("name", METHODS)
def test_random_messages_to_the_admin_port_get_one_answer_or_one_refusal(server: ServerProcess, name: str) -> None:
    method = METHODS[name]
    assert server.admin_target is not None
    with grpc.insecure_channel(server.admin_target) as channel, Client(server.target) as client:
        path = f"/{method.containing_service.full_name}/{name}"
        ask: Any = channel.unary_unary(path, response_deserializer=GetMessageClass(method.output_type).FromString)

        @fuzzed(NUM_EXAMPLES)
        @given(messages(method.input_type, GIVEN))
        def holds(data: bytes) -> None:
            try:
                ask(data, timeout=PATIENCE_S)
            except grpc.RpcError as error:
                check_admin_refusal(error, method.input_type)

        holds()
        assert client.generate_text("How are you?").text
    assert server.process.poll() is None
