"""Clients that let calls wait: unread answers, incomplete requests, and bursts that gRPC core must not refuse.

A server in this process, attacked over raw HTTP/2: no gRPC client leaves an answer unread or sends headers alone.
"""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from h2.settings import SettingCodes
from hyperframe.frame import HeadersFrame, PingFrame, SettingsFrame

from antiphon.server.app import MAX_INCOMPLETE_BYTES
from antiphon.server.ports import max_unaccepted_calls
from antiphon.v1 import inference_pb2 as pb
from tests.abuse.calls import HEALTH_METHOD, REFLECTION, REFLECTION_METHOD, SERVICE, UNARY, UNKNOWN_METHOD
from tests.abuse.raw_connection import PREFACE, Address, RawConnection, framed
from tests.serving import Serving, serving, stub_of
from tests.waits import comes_true

SCORED = pb.GenerateRequest(
    text="the cat sat on the mat", options=pb.GenerateOptions(max_new_tokens=24, ignore_eos=True, num_logprobs=20)
).SerializeToString()
MANY_SCORED = pb.GenerateManyRequest(
    requests=[pb.ManyRequest(id=number, request=pb.GenerateRequest.FromString(SCORED)) for number in range(16)]
).SerializeToString()
NO_WINDOW = {SettingCodes.INITIAL_WINDOW_SIZE: 0}
PATIENCE_S = 60
LONG = pb.TokenizeRequest(text="the cat " * 200).SerializeToString()  # its answer has some 2,000 bytes
OIP_METHOD = "inference.GRPCInferenceService/ServerLive"


def address_of(served: Serving) -> Address:
    return Address(port=int(served.target.rpartition(":")[2]))


def messages_of(data: bytes) -> Iterator[bytes]:
    """Return the messages of a stream, without gRPC's prefixes."""
    while data:
        end = 5 + int.from_bytes(data[1:5])
        yield bytes(data[5:end])
        data = data[end:]


def sample(served: Serving, name: str, **labels: str) -> float:
    return served.registry.get_sample_value(f"antiphon_{name}", labels) or 0.0


@contextlib.asynccontextmanager
async def unread(served: Serving, num_calls: int, message: bytes) -> AsyncIterator[RawConnection]:
    """Open a connection with calls whose answers have no flow-control window."""
    async with await RawConnection.open(address_of(served), NO_WINDOW, gives_credit=False) as connection:
        for _ in range(num_calls):
            connection.call(UNARY.method, message)
        await connection.flush()
        yield connection


async def until(served: Serving, name: str, least: float, **labels: str) -> None:
    """Wait until a metric has at least a value, because no event reports that an answer waits to be read."""
    await comes_true(lambda: sample(served, name, **labels) >= least, PATIENCE_S)


@pytest.mark.hardship
async def test_unread_unary_answers_count_as_in_flight_until_their_time_limit() -> None:
    """Regression: the limit counted them, but the metrics did not, and they had no time limit."""
    async with serving(slow_reader_timeout_s=1.0) as served, unread(served, 8, LONG) as connection:
        await until(served, "calls_waiting_for_client", 8, stage="answer")
        assert sample(served, "grpc_server_in_flight") == 8
        assert sample(served, "unsent_answer_bytes") > 8 * 1000
        await served.settled()
        assert await connection.ends(PATIENCE_S) == {"RESOURCE_EXHAUSTED": 8}
        messages = {stream.trailers["grpc-message"] for stream in connection.streams.values()}
        assert messages == {"the client took no message for 1 s"}
        await served.settled()
        assert sample(served, "grpc_server_in_flight") == 0
        assert sample(served, "unsent_answer_bytes") == 0
        assert sample(served, "calls_given_up_total", stage="answer", cause="timeout") == 8
        assert sample(served, "grpc_server_handled_total", method=UNARY.method, code="RESOURCE_EXHAUSTED") == 8
        assert sample(served, "grpc_server_handled_total", method=UNARY.method, code="OK") == 0


@pytest.mark.hardship
async def test_unread_answers_are_ended_to_make_room_for_calls_of_others() -> None:
    """Regression: other clients were refused while the answers stayed unread."""
    async with serving(max_concurrent_rpcs=4) as served, unread(served, 4, LONG):
        await until(served, "calls_waiting_for_client", 4, stage="answer")
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):  # in the first second, in which none is given up
                    await stub_of(served).GetModel(pb.GetModelRequest())
                    break
                await asyncio.sleep(0.05)
        assert sample(served, "calls_given_up_total", stage="answer", cause="pressure") >= 1


@pytest.mark.hardship
async def test_unread_answers_are_bounded_in_bytes() -> None:
    async with serving(max_unsent_bytes=65_536) as served, unread(served, 200, LONG):
        await until(served, "calls_given_up_total", 1, stage="answer", cause="pressure")
        assert sample(served, "unsent_answer_bytes") <= 65_536
        assert (await stub_of(served).Tokenize(pb.TokenizeRequest(text="the cat"))).token_ids


@pytest.mark.hardship
@pytest.mark.parametrize(
    ("method", "message", "num_calls"), [("Generate", SCORED, 40), ("GenerateMany", MANY_SCORED, 8)]
)
async def test_unread_streams_are_bounded_with_all_behind_them(method: str, message: bytes, num_calls: int) -> None:
    """Regression: a stream whose client read nothing kept its tokens as objects, which no limit counted."""
    async with serving(max_unsent_bytes=65_536) as served:
        async with await RawConnection.open(address_of(served), NO_WINDOW, gives_credit=False) as connection:
            for _ in range(num_calls):
                connection.call(f"{SERVICE}/{method}", message)
            await connection.flush()
            await until(served, "calls_given_up_total", 1, stage="answer", cause="pressure")
            # Between two looks more can be unread.
            await comes_true(lambda: sample(served, "unsent_answer_bytes") <= 65_536)
            assert (await stub_of(served).GenerateUnary(pb.GenerateUnaryRequest.FromString(SCORED))).outputs
            await comes_true(lambda: any(stream.trailers for stream in connection.streams.values()))
            ended = [stream for stream in connection.streams.values() if stream.trailers]
        assert ended[0].end == "RESOURCE_EXHAUSTED"
        assert ended[0].trailers["grpc-message"].endswith(" bytes of answers wait to be read")
        await served.settled()
        assert sample(served, "unsent_answer_bytes") == 0


async def test_slow_reader_within_the_limits_gets_its_whole_answer() -> None:
    async with serving() as served:
        whole = await stub_of(served).GenerateUnary(pb.GenerateUnaryRequest.FromString(SCORED))
        async with await RawConnection.open(address_of(served), NO_WINDOW, gives_credit=False) as connection:
            stream_id = connection.call(f"{SERVICE}/Generate", SCORED)
            await connection.flush()
            await until(served, "unsent_answer_bytes", 4000)  # the packed tokens behind the first message
            await until(served, "generation_tokens_total", 2 * len(whole.outputs[0].token_ids), model_name="fake")
            connection.grant(2**30, stream_id)
            connection.grant(2**30)
            await connection.flush()
            assert await connection.ends(PATIENCE_S) == {"OK": 1}
            data = bytes(connection.streams[stream_id].data)
            deltas = [pb.GenerateResponse.FromString(message) for message in messages_of(data)]
    assert "".join(delta.text_delta for delta in deltas) == whole.outputs[0].text
    assert [token_id for delta in deltas for token_id in delta.token_ids] == whole.outputs[0].token_ids
    assert [entry for delta in deltas for entry in delta.logprobs] == whole.outputs[0].logprobs


@pytest.mark.hardship
async def test_unread_answers_of_a_standard_service_have_the_limits_of_other_answers() -> None:
    """Regression: answers of 60 KB with descriptors waited for their clients without a limit."""
    async with (
        serving(slow_reader_timeout_s=0.5) as served,
        await RawConnection.open(address_of(served), NO_WINDOW, gives_credit=False) as connection,
    ):
        for _ in range(3):
            connection.call(REFLECTION.method, REFLECTION.message)
        await connection.flush()
        await until(served, "unsent_answer_bytes", 3 * 2 * 10_000)
        assert await connection.ends(PATIENCE_S) == {"RESOURCE_EXHAUSTED": 3}


@pytest.mark.hardship
async def test_messages_without_their_ends_are_bounded() -> None:
    """Regression: 759 of them took 800 MB although the limit on their number was 256."""
    body = framed(bytes((1 << 20) - 8))[:-1]
    async with serving() as served, await RawConnection.open(address_of(served)) as connection:
        await connection.greeted()
        limit = MAX_INCOMPLETE_BYTES >> 20
        stream_ids = [connection.headers(UNARY.method) for _ in range(4 * limit)]
        sending = [asyncio.ensure_future(connection.body(number, body, is_end=False)) for number in stream_ids]
        await until(served, "calls_given_up_total", 3 * limit, stage="request", cause="pressure")
        assert sample(served, "calls_waiting_for_client", stage="request") <= limit
        for task in sending:
            task.cancel()
        await asyncio.wait(sending)


@pytest.mark.hardship
async def test_calls_that_wait_for_the_event_loop_are_bounded() -> None:
    """Regression: 100,000 calls that their client had reset at once took 1.6 GB in core."""
    limit = max_unaccepted_calls(64)
    async with serving(max_concurrent_rpcs=64, max_concurrent_streams=100_000, request_timeout_s=0.2) as served:
        async with await RawConnection.open(address_of(served)) as connection:
            block = connection.header_block(UNARY.method)
        headers = (HeadersFrame(number, block, flags=("END_HEADERS",)) for number in range(1, 4 * limit, 2))
        frames = (SettingsFrame(0), *headers, PingFrame(0, b"all read"))
        with socket.create_connection(("127.0.0.1", address_of(served).port)) as client:
            # Without await: the event loop accepts no call before core has read all of them.
            client.sendall(PREFACE + b"".join(frame.serialize() for frame in frames))
            acknowledged, received = PingFrame(0, b"all read", flags=("ACK",)).serialize(), b""
            while acknowledged not in received:
                received += client.recv(65_536)
            await comes_true(lambda: len(served.ended) >= limit)
            await stub_of(served).GetModel(pb.GetModelRequest())  # it is answered behind all of them
            ended = sum(call.method == UNARY.method for call in served.ended)
    assert limit <= ended <= limit + 2  # the event loop had asked for one call already


@pytest.mark.hardship
@pytest.mark.parametrize("method", [UNARY.method, f"{SERVICE}/Generate", HEALTH_METHOD, REFLECTION_METHOD, OIP_METHOD])
async def test_call_is_ended_when_its_request_does_not_arrive(method: str) -> None:
    """Regression: such calls had no time limit, and were neither counted nor logged."""
    async with serving(request_timeout_s=0.2) as served:
        async with await RawConnection.open(address_of(served)) as connection:
            stream_ids = [connection.headers(method) for _ in range(3)]
            await connection.flush()
            assert await connection.ends(PATIENCE_S) == {"DEADLINE_EXCEEDED": 3}
            message = connection.streams[stream_ids[0]].trailers["grpc-message"]
        await served.settled()
        assert message == "no complete request came within 0.2 s"
        await until(served, "grpc_server_handled_total", 3, method=method, code="DEADLINE_EXCEEDED")
        assert sample(served, "calls_given_up_total", stage="request", cause="timeout") == 3
        assert sample(served, "grpc_server_in_flight") == 0


async def test_call_is_refused_when_it_ends_without_a_request() -> None:
    """Regression: gRPC's handler of unary calls never sent a status."""
    async with serving() as served, await RawConnection.open(address_of(served)) as connection:
        connection.headers(UNARY.method, is_end=True)
        await connection.flush()
        assert await connection.ends(PATIENCE_S) == {"INVALID_ARGUMENT": 1}


@pytest.mark.hardship
async def test_idle_streams_are_ended_to_make_room_for_a_probe() -> None:
    """A health stream can stay open forever; a server with many of them must still answer probes."""
    watch = HEALTH_METHOD.replace("Check", "Watch")
    async with serving(max_concurrent_rpcs=2) as served, await RawConnection.open(address_of(served)) as connection:
        for _ in range(2):
            connection.call(watch, b"")
        await connection.flush()
        await until(served, "calls_waiting_for_client", 2, stage="open")
        async with asyncio.timeout(PATIENCE_S):
            while "OK" not in [stream.end for stream in connection.streams.values()]:
                connection.call(HEALTH_METHOD, b"")  # refused in the first second, in which no stream is given up
                await connection.flush()
                await asyncio.sleep(0.05)
        await until(served, "grpc_server_handled_total", 1, method=watch, code="RESOURCE_EXHAUSTED")
        # Its handler ends a moment later.
        await until(served, "calls_waiting_for_client", 1, stage="open")
        await comes_true(lambda: sample(served, "grpc_server_in_flight") == 1)
        assert sample(served, "calls_waiting_for_client", stage="open") == 1


async def test_unknown_method_is_refused_and_counted_under_one_name() -> None:
    async with serving() as served:
        async with await RawConnection.open(address_of(served)) as connection:
            connection.call(UNKNOWN_METHOD, b"")
            connection.headers("nobody.Nothing/Nothing")
            await connection.flush()
            assert await connection.ends(PATIENCE_S) == {"UNIMPLEMENTED": 2}
        await until(served, "grpc_server_handled_total", 2, method="(unknown)", code="UNIMPLEMENTED")


@pytest.mark.hardship
@pytest.mark.parametrize("num_connections", [1, 4])
async def test_burst_of_calls_is_answered_and_not_refused_by_core(num_connections: int) -> None:
    """Regression: beyond 1,000 waiting calls or unfreed streams, gRPC core cancelled calls at random."""
    num_calls = 2000 // num_connections
    async with serving(max_concurrent_streams=2000) as served, contextlib.AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(await RawConnection.open(address_of(served)))
            for _ in range(num_connections)
        ]
        for connection in connections:
            await connection.greeted()
            for _ in range(num_calls):
                connection.call(f"{SERVICE}/GetModel", b"")
        for connection in connections:
            await connection.flush()
        ends = sum([await connection.ends(PATIENCE_S) for connection in connections], Counter[str]())
        assert ends == {"OK": num_calls * num_connections}


@pytest.mark.hardship
async def test_metadata_is_bounded_for_clients_that_never_acknowledge_the_limit() -> None:
    async with serving(max_metadata_bytes=2048) as served:
        async with await RawConnection.open(address_of(served), answers=False) as connection:
            connection.headers(UNARY.method, metadata=(("x", "a" * 4000),))
            await connection.flush()
            assert await connection.ends(PATIENCE_S) == {"RESOURCE_EXHAUSTED": 1}
        await until(served, "grpc_server_handled_total", 1, method=UNARY.method, code="RESOURCE_EXHAUSTED")


@pytest.mark.hardship
async def test_connection_that_resets_its_calls_at_once_is_closed() -> None:
    """Regression: each call cost the server 0.15 ms, and others waited behind 100,000 of them."""
    async with serving() as served, await RawConnection.open(address_of(served)) as connection:
        for _ in range(2000):
            connection.reset(connection.headers(UNARY.method))
            if connection.is_closed:
                break
        await connection.flush()
        assert await connection.wait_closed(PATIENCE_S)
        await until(served, "connections_closed_total", 1)
        assert (await stub_of(served).Tokenize(pb.TokenizeRequest(text="the cat"))).token_ids
