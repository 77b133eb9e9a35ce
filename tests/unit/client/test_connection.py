"""Connections of asynchronous and synchronous clients to real servers: retries, balancing, tokens, deadlines."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from antiphon.client import AsyncClient, Client, Connection, Priority, RetryPolicy, ServerError
from antiphon.client.connection import WORKER_KEY, Offer, Placement, is_loopback, offer_of
from antiphon.v1 import inference_pb2 as pb
from tests.refusing import Context, recording, refuse
from tests.serving import serving

PATIENCE_S = 60.0
# Longer than any test waits: a client answered in time has followed the retry delay of the server.
PUSHED_BACK = RetryPolicy(backoff_s=600, max_backoff_s=600)
AT_ONCE = RetryPolicy(backoff_s=0.01, max_backoff_s=0.01)
# gRPC sends two or three digits of a deadline, rounded up.
WIRE = 1.1
Ask = Callable[..., Awaitable[str]]


async def ask_async_whole(target: str, text: str = "a", timeout_s: float | None = PATIENCE_S, **given: Any) -> str:
    async with AsyncClient(target, timeout_s=timeout_s, **given) as client:
        return (await client.generate_text(text)).text


async def ask_async_stream(
    target: str,
    text: str = "a",
    timeout_s: float | None = PATIENCE_S,
    on_delta: Callable[[], None] = lambda: None,
    **given: Any,
) -> str:
    async with AsyncClient(target, timeout_s=timeout_s, **given) as client:
        texts = []
        async for delta in client.generate(text):
            texts.append(delta.text)
            on_delta()
    return "".join(texts)


def in_thread(work: Callable[[Client, str, Callable[[], None]], str]) -> Ask:
    async def ask(
        target: str,
        text: str = "a",
        timeout_s: float | None = PATIENCE_S,
        on_delta: Callable[[], None] = lambda: None,
        **given: Any,
    ) -> str:
        def run() -> str:
            with Client(target, timeout_s=timeout_s, **given) as client:
                return work(client, text, on_delta)

        return await asyncio.to_thread(run)

    return ask


def stream_of(client: Client, text: str, on_delta: Callable[[], None]) -> str:
    texts = []
    for delta in client.generate(text):
        texts.append(delta.text)
        on_delta()
    return "".join(texts)


def one_of_many(client: Client, text: str, on_delta: Callable[[], None]) -> str:
    (result,) = client.generate_many([text])
    if isinstance(result, ServerError):
        raise result
    return result.text


ask_sync_whole = in_thread(lambda client, text, _: client.generate_text(text).text)
ask_sync_stream = in_thread(stream_of)
ask_sync_many = in_thread(one_of_many)
EVERY_KIND = pytest.mark.parametrize(
    "ask", [ask_async_whole, ask_async_stream, ask_sync_whole, ask_sync_stream, ask_sync_many]
)


@EVERY_KIND
async def test_refused_call_is_retried_after_the_delay_of_the_server(ask: Ask) -> None:
    async with recording(refuse(3, metadata=(("grpc-retry-pushback-ms", "1"),))) as (target, asked):
        assert await ask(target, connection=Connection(retry=PUSHED_BACK)) == "whole"
    assert [metadata.get("grpc-previous-rpc-attempts") for metadata in asked.metadata] == [None, "1", "2", "3"]


@EVERY_KIND
async def test_unavailable_call_is_retried_up_to_the_number_of_attempts(ask: Ask) -> None:
    async with recording(refuse(2, grpc.StatusCode.UNAVAILABLE)) as (target, asked):
        assert await ask(target, connection=Connection(retry=AT_ONCE)) == "whole"
        assert asked.num_attempts == 3
    async with recording(refuse(99, grpc.StatusCode.UNAVAILABLE)) as (target, asked):
        with pytest.raises(ServerError) as caught:
            await ask(target, connection=Connection(retry=RetryPolicy(attempts=2, backoff_s=0.01)))
    assert (caught.value.code, asked.num_attempts) == (grpc.StatusCode.UNAVAILABLE, 2)


@EVERY_KIND
async def test_call_is_retried_when_it_reached_a_closing_server(ask: Ask) -> None:
    async with recording(refuse(1, grpc.StatusCode.CANCELLED)) as (target, asked):
        assert await ask(target, connection=Connection(retry=AT_ONCE)) == "whole"
    assert asked.num_attempts == 2


@EVERY_KIND
async def test_pushback_below_zero_ends_the_retries(ask: Ask) -> None:
    async with recording(refuse(1, metadata=(("grpc-retry-pushback-ms", "-1"),))) as (target, asked):
        with pytest.raises(ServerError) as caught:
            await ask(target, connection=Connection(retry=AT_ONCE))
    assert (asked.num_attempts, caught.value.retry_after_s) == (1, None)


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL])
async def test_other_refusals_are_final(code: grpc.StatusCode) -> None:
    async with recording(refuse(1, code)) as (target, asked):
        with pytest.raises(ServerError):
            await ask_async_whole(target, connection=Connection(retry=AT_ONCE))
    assert asked.num_attempts == 1


@pytest.mark.parametrize("ask", [ask_async_stream, ask_sync_stream])
async def test_stream_is_never_retried_after_its_first_message(ask: Ask) -> None:
    """The server waits until the message is read: core may retry if message and status arrive together."""
    loop, is_read = asyncio.get_running_loop(), asyncio.Event()

    async def break_off(attempt: int, context: Context) -> None:
        await context.write(pb.GenerateResponse(text_delta="a"))
        await asyncio.wait_for(is_read.wait(), PATIENCE_S)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    async with recording(break_off) as (target, asked):
        with pytest.raises(ServerError, match="gone"):
            await ask(
                target, connection=Connection(retry=AT_ONCE), on_delta=lambda: loop.call_soon_threadsafe(is_read.set)
            )
    assert asked.num_attempts == 1


@EVERY_KIND
async def test_deadline_ends_the_retries(ask: Ask) -> None:
    async with recording(refuse(99, metadata=(("grpc-retry-pushback-ms", "600000"),))) as (target, asked):
        with pytest.raises(ServerError) as caught:
            await ask(target, timeout_s=0.5)
    assert (caught.value.code, asked.num_attempts) == (grpc.StatusCode.DEADLINE_EXCEEDED, 1)


async def test_retries_stop_when_half_the_budget_is_spent() -> None:
    connection = Connection(retry=RetryPolicy(attempts=2, backoff_s=0.01, budget=6))
    async with recording(refuse(99)) as (target, asked), AsyncClient(target, connection=connection) as client:
        for _ in range(10):
            with pytest.raises(ServerError):
                await client.generate_text("a")
    # The first call's failures leave five and four of the six tokens, the second's three: too few to be made again.
    assert asked.num_attempts == 10 + 2 - 1


@pytest.mark.parametrize("ask", [ask_async_whole, ask_sync_whole])
async def test_request_larger_than_grpcs_retry_buffer_is_retried(ask: Ask) -> None:
    text = "a" * 1_000_000
    async with recording(refuse(1)) as (target, asked):
        assert await ask(target, text, connection=Connection(retry=AT_ONCE)) == "whole"
    assert [len(request.text) for request in asked.requests] == [len(text)] * 2


@pytest.mark.parametrize("ask", [ask_async_whole, ask_sync_whole])
async def test_round_robin_spreads_calls_and_survives_the_loss_of_a_replica(ask: Ask) -> None:
    connection = Connection(load_balancing="round_robin", retry=AT_ONCE)
    async with recording() as (second, asked_second):
        async with recording() as (first, asked_first), AsyncClient(
            f"ipv4:{first},{second}", connection=connection
        ) as client:  # fmt: skip
            for _ in range(1000):  # until both are connected
                if asked_first.num_attempts and asked_second.num_attempts:
                    break
                await client.generate_text("a")
            before = asked_first.num_attempts, asked_second.num_attempts
            for _ in range(20):
                await client.generate_text("a")
            assert (asked_first.num_attempts, asked_second.num_attempts) == (before[0] + 10, before[1] + 10)
        assert await ask(f"ipv4:{first},{second}", connection=connection) == "whole"


async def test_round_robin_skips_a_replica_that_reports_that_it_is_not_ready() -> None:
    connection = Connection(load_balancing="round_robin", retry=RetryPolicy(attempts=1))
    async with serving() as leaving, serving() as staying:
        leaving_port = leaving.target.rpartition(":")[2]
        async with AsyncClient(f"ipv4:{staying.target},127.0.0.1:{leaving_port}", connection=connection) as client:
            while not (leaving.ended and staying.ended):  # until both are connected
                await client.generate_text("a")
            await leaving.probes.leave()
            for _ in range(50):  # until the client has received the new state
                before = len(leaving.ended)
                for _ in range(20):
                    await client.generate_text("a")
                await leaving.settled()
                if len(leaving.ended) == before:
                    break
            assert len(leaving.ended) == before


async def test_pick_first_uses_one_replica() -> None:
    async with (
        recording() as (first, asked_first),
        recording() as (second, asked_second),
        AsyncClient(f"ipv4:{first},{second}") as client,
    ):
        for _ in range(20):
            await client.generate_text("a")
    assert (asked_first.num_attempts, asked_second.num_attempts) == (20, 0)


@EVERY_KIND
async def test_every_call_carries_token_metadata_and_priority(ask: Ask) -> None:
    connection = Connection(token="secret", metadata={"x-tenant": "blue"})
    async with recording() as (target, asked):
        await ask(target, connection=connection, priority="batch")
        await ask(target)
    sent, plain = asked.metadata
    assert (sent["authorization"], sent["x-tenant"]) == ("Bearer secret", "blue")
    assert not {"authorization", "x-tenant"} & plain.keys()
    assert [request.priority for request in asked.requests] == [2, 0]


async def test_token_function_is_called_for_every_call() -> None:
    tokens = iter(["one", "two"])
    connection = Connection(token=lambda: next(tokens))
    async with recording() as (target, asked), AsyncClient(target, connection=connection) as client:
        await client.generate_text("a")
        await client.generate_text("a")
    assert [metadata["authorization"] for metadata in asked.metadata] == ["Bearer one", "Bearer two"]


async def test_token_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    connection = Connection(token_file=file)
    async with recording() as (target, asked), AsyncClient(target, connection=connection) as client:
        await client.generate_text("a")
        (tmp_path / "next").write_text("renewed\n")
        (tmp_path / "next").replace(file)
        await client.generate_text("a")
        file.write_text("")
        with pytest.raises(ValueError, match=r"^token_file is .*token, which is empty"):
            await client.generate_text("a")
    assert [metadata["authorization"] for metadata in asked.metadata] == ["Bearer first", "Bearer renewed"]


@EVERY_KIND
async def test_deadline_of_the_client_applies_when_a_call_has_none(ask: Ask) -> None:
    async with recording() as (target, asked):
        await ask(target, timeout_s=None)
        await ask(target, timeout_s=50.0)
    none, own = asked.remaining_s
    assert none is None
    assert own is not None
    assert own <= 50 * WIRE


async def test_call_overrides_the_clients_deadline() -> None:
    async with recording() as (target, asked), AsyncClient(target, timeout_s=50.0) as client:
        await client.generate_text("a")
        await client.generate_text("a", timeout_s=1000.0)
        await client.generate_text("a", timeout_s=math.inf)
    own, longer, none = asked.remaining_s
    assert own is not None
    assert longer is not None
    assert own <= 50 * WIRE < longer <= 1000 * WIRE
    assert none is None


async def test_refusal_reports_the_retry_delay_and_the_request_id() -> None:
    metadata = (("grpc-retry-pushback-ms", "1500"), ("x-request-id", "abc-1"))
    async with recording(refuse(1, metadata=metadata)) as (target, _):
        with pytest.raises(ServerError) as caught:
            await ask_async_whole(target, connection=Connection(retry=RetryPolicy(attempts=1)))
    assert (caught.value.retry_after_s, caught.value.request_id) == (1.5, "abc-1")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RetryPolicy(attempts=0), "attempts is 0; it must be 1 to 5"),
        (lambda: RetryPolicy(attempts=6), "attempts is 6; it must be 1 to 5"),
        (lambda: RetryPolicy(backoff_s=0), "backoff_s is 0; it must be"),
        (lambda: RetryPolicy(backoff_s=3), "max_backoff_s is 2.0; it must be 3 to"),
        (lambda: RetryPolicy(budget=0), "budget is 0; it must be 1 to 1000"),
        (lambda: RetryPolicy(budget_ratio=0), "budget_ratio is 0; it must be"),
        (lambda: Connection(tls_cert="c.pem"), "tls_cert is given without tls_key"),
        (lambda: Connection(tls_key="k.pem"), "tls_key is given without tls_cert"),
        (lambda: Connection(token="a", token_file="b"), "token and token_file are both given"),
        (lambda: Connection(load_balancing="random"), "load_balancing is 'random'; it must be one of"),  # type: ignore[arg-type]
        (lambda: Connection(keepalive_s=9), "keepalive_s is 9; it must be 10"),
        (lambda: Connection(max_reconnect_s=0), "max_reconnect_s is 0; it must be 0.1"),
        (lambda: Client(priority="urgent"), "priority is 'urgent'; it must be one of interactive, batch"),  # type: ignore[arg-type]
        (lambda: Client(timeout_s=0), "timeout_s is 0; it must be above 0"),
        (lambda: Client(connection=Connection(token_file="/nowhere/t")), "token_file is /nowhere/t, which cannot be"),
        (lambda: Client(connection=Connection(tls_ca="/nowhere/ca")), "tls_ca is /nowhere/ca, which cannot be read"),
    ],
)
def test_wrong_field_is_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        make()


@pytest.mark.parametrize("priority", ["interactive", "batch"])
def test_priorities_equal_those_of_the_contract(priority: Priority) -> None:
    Client(priority=priority).close()


def test_token_is_never_shown() -> None:
    assert "secret" not in repr(Connection(token="secret"))


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("127.0.0.1:50051", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("dns:///localhost:50051", True),
        ("unix:///run/antiphon", True),
        ("ipv4:127.0.0.1:1,127.0.0.1:2", True),
        ("ipv4:127.0.0.1:1,10.0.0.1:2", False),
        ("dns:///antiphon.cli.models.svc:50051", False),
        ("10.0.0.1:50051", False),
    ],
)
def test_loopback_targets_are_recognised(target: str, expected: bool) -> None:
    assert is_loopback(target) is expected


def test_token_that_would_travel_in_the_open_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"the token is sent to 192\.0\.2\.1:50051 unencrypted"):
        Client("192.0.2.1:50051", connection=Connection(token="secret")).close()


@pytest.mark.parametrize(
    ("code", "is_known"),
    [
        (grpc.StatusCode.OK, True),
        (grpc.StatusCode.UNIMPLEMENTED, False),
        (grpc.StatusCode.UNAVAILABLE, None),
        (grpc.StatusCode.UNAUTHENTICATED, None),
    ],
)
def test_only_a_definite_answer_counts(code: grpc.StatusCode, is_known: bool | None) -> None:
    assert offer_of(code, None) == Offer(is_known, 0, 1)


def test_trailer_names_the_process() -> None:
    assert offer_of(grpc.StatusCode.OK, [("x", "y"), (WORKER_KEY, "3/8")]) == Offer(True, 3, 8)


@pytest.mark.parametrize("num_workers", [1, 2, 8, 32])
def test_one_connection_to_each_process_is_kept(num_workers: int) -> None:
    kernel = random.Random(num_workers)
    first = Offer(True, kernel.randrange(num_workers), num_workers)
    placement, kept = Placement(first), [first.worker]
    while placement.wants_more():
        offer = Offer(True, kernel.randrange(num_workers), num_workers)
        if placement.keeps(offer):
            kept.append(offer.worker)
    assert sorted(kept) == list(range(num_workers))


def test_attempts_end_when_a_process_is_never_reached() -> None:
    placement, num_attempts = Placement(Offer(True, 0, 2)), 0
    while placement.wants_more():
        num_attempts += 1
        assert not placement.keeps(Offer(True, 0, 2))
        assert not placement.keeps(Offer(None, 1, 2))
    assert num_attempts == 16
