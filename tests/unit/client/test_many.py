"""generate_many of both clients, and concurrent work with ordered results, of which it is made."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from antiphon.client import AsyncClient, Client, Connection, Generation, RetryPolicy, ServerError
from antiphon.client.many import WINDOW_PER_REQUEST
from antiphon.client.many_tasks import ordered_map
from antiphon.v1 import inference_pb2 as pb
from tests.refusing import hosting
from tests.serving import serving
from tests.waits import comes_true

QUICK = Connection(retry=RetryPolicy(attempts=3, backoff_s=0.01, max_backoff_s=0.02, budget=None))
TEXTS = [f"text {number}" for number in range(12)]
Results = list[Generation | ServerError]
Ask = Callable[..., Awaitable[Results]]


async def ask_async(target: str, timeout_s: float | None = None) -> Results:
    async with AsyncClient(target, connection=QUICK, timeout_s=timeout_s) as client:
        return [result async for result in client.generate_many(TEXTS, concurrency=4)]


async def ask_sync(target: str, timeout_s: float | None = None) -> Results:
    def ask() -> Results:
        with Client(target, connection=QUICK, timeout_s=timeout_s) as client:
            return list(client.generate_many(TEXTS, concurrency=4))

    return await asyncio.to_thread(ask)


@pytest.fixture(params=[ask_async, ask_sync], ids=["async", "sync"])
def ask(request: pytest.FixtureRequest) -> Ask:
    chosen: Ask = request.param
    return chosen


class Scripted:
    """Server whose GenerateMany is a script. received: how often each text was asked. calls: GenerateMany calls."""

    def __init__(self, script: Callable[[Scripted, Any], Awaitable[None]] | None) -> None:
        self._script = script
        self.received: Counter[str] = Counter()
        self.num_calls = self.num_single = 0

    def handler(self) -> grpc.GenericRpcHandler:
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "GenerateUnary": grpc.unary_unary_rpc_method_handler(
                self._single, pb.GenerateUnaryRequest.FromString, pb.GenerateUnaryResponse.SerializeToString
            )
        }
        if self._script is not None:
            methods["GenerateMany"] = grpc.stream_stream_rpc_method_handler(
                self._many, pb.GenerateManyRequest.FromString, pb.GenerateManyResponse.SerializeToString
            )
        return grpc.method_handlers_generic_handler("antiphon.v1.InferenceService", methods)

    async def _single(self, request: pb.GenerateUnaryRequest, context: Any) -> pb.GenerateUnaryResponse:
        self.num_single += 1
        return whole(request.text)

    async def _many(self, _: object, context: Any) -> None:
        assert self._script is not None
        await self._script(self, context)

    async def requests(self, context: Any) -> AsyncIterator[pb.ManyRequest]:
        """Read the requests of a call; the call counts once it sends one, which a client's question does not."""
        while (message := await context.read()) is not grpc.aio.EOF:
            if not self.num_calls or not message.requests:
                self.num_calls += 1
            for request in message.requests:
                self.received[request.request.text] += 1
                yield request


def whole(text: str) -> pb.GenerateUnaryResponse:
    output = pb.Output(text=text.upper(), token_ids=[1], finish_reason=pb.FINISH_REASON_STOP)
    return pb.GenerateUnaryResponse(outputs=[output], usage=pb.Usage(generated_tokens=2), seed=1)


def answered(request: pb.ManyRequest) -> pb.GenerateManyResponse:
    return pb.GenerateManyResponse(answers=[pb.ManyAnswer(id=request.id, whole=whole(request.request.text))])


def refused(request: pb.ManyRequest, code: grpc.StatusCode) -> pb.GenerateManyResponse:
    failure = pb.Failure(code=code.value[0], message="not now", reason="QUEUE_FULL")
    failure.retry_after.FromMilliseconds(5)
    return pb.GenerateManyResponse(answers=[pb.ManyAnswer(id=request.id, failure=failure)])


@contextlib.asynccontextmanager
async def scripted(script: Callable[[Scripted, Any], Awaitable[None]] | None) -> AsyncIterator[tuple[str, Scripted]]:
    servicer = Scripted(script)
    async with hosting(servicer.handler()) as target:
        yield target, servicer


def texts_of(results: Results) -> list[str]:
    return [result.text if isinstance(result, Generation) else result.code.name for result in results]


EXPECTED = [text.upper() for text in TEXTS]


async def test_all_requests_share_one_call(ask: Ask) -> None:
    async with serving() as served:
        results = await ask(served.target)
        await served.settled()
        methods = Counter(call.method.partition("/")[2] for call in served.ended)
        assert {call.code for call in served.ended} == {"OK"}
    assert all(isinstance(result, Generation) for result in results)
    assert methods["GenerateMany:request"] == len(TEXTS)
    assert not methods["GenerateUnary"]


async def test_older_server_gets_single_calls(ask: Ask) -> None:
    async with scripted(None) as (target, server):
        assert texts_of(await ask(target)) == EXPECTED
        assert server.num_single == len(TEXTS)


async def test_refused_requests_are_sent_again_after_the_advice(ask: Ask) -> None:
    async def refuse_first(server: Scripted, context: Any) -> None:
        async for request in server.requests(context):
            is_first = server.received[request.request.text] == 1
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            await context.write(refused(request, code) if is_first else answered(request))

    async with scripted(refuse_first) as (target, server):
        assert texts_of(await ask(target)) == EXPECTED
    assert set(server.received.values()) == {2}
    assert not server.num_single


async def test_request_that_is_refused_at_every_attempt_yields_its_error_in_its_place(ask: Ask) -> None:
    async def refuse_one(server: Scripted, context: Any) -> None:
        async for request in server.requests(context):
            is_bad = request.request.text == TEXTS[5]
            await context.write(refused(request, grpc.StatusCode.UNAVAILABLE) if is_bad else answered(request))

    async with scripted(refuse_one) as (target, server):
        results = await ask(target)
    assert texts_of(results) == [*EXPECTED[:5], "UNAVAILABLE", *EXPECTED[6:]]
    error = results[5]
    assert isinstance(error, ServerError)
    assert (error.reason, error.retry_after_s) == ("QUEUE_FULL", 0.005)
    assert server.received[TEXTS[5]] == 3


async def test_wrong_request_is_not_sent_again(ask: Ask) -> None:
    async def refuse_one(server: Scripted, context: Any) -> None:
        async for request in server.requests(context):
            is_bad = request.request.text == TEXTS[0]
            await context.write(refused(request, grpc.StatusCode.INVALID_ARGUMENT) if is_bad else answered(request))

    async with scripted(refuse_one) as (target, server):
        assert texts_of(await ask(target))[0] == "INVALID_ARGUMENT"
    assert server.received[TEXTS[0]] == 1


@pytest.mark.parametrize("ends_with", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, None])
async def test_requests_of_a_broken_call_are_sent_over_another(ask: Ask, ends_with: grpc.StatusCode | None) -> None:
    async def break_once(server: Scripted, context: Any) -> None:
        async for request in server.requests(context):
            if request.request.text == TEXTS[6] and server.received[TEXTS[6]] == 1:
                if ends_with is not None:
                    await context.abort(ends_with, "the server stops")
                return
            await context.write(answered(request))

    async with scripted(break_once) as (target, server):
        assert texts_of(await ask(target)) == EXPECTED
    assert server.received[TEXTS[6]] == 2
    assert all(server.received[text] == 1 for text in TEXTS[:3])  # answered long before: at most four are unanswered


async def test_request_that_waits_for_another_attempt_is_sent_once_over_the_next_call(ask: Ask) -> None:
    ids: list[list[int]] = []

    async def refuse_and_break(server: Scripted, context: Any) -> None:
        ids.append([])
        async for request in server.requests(context):
            ids[-1].append(request.id)
            if len(ids) > 2:  # the first call asks whether the server knows the method
                await context.write(answered(request))
            elif request.id == 0:
                await context.write(refused(request, grpc.StatusCode.UNAVAILABLE))
            else:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the server stops")

    async with scripted(refuse_and_break) as (target, _):
        assert texts_of(await ask(target)) == EXPECTED
    for of_call in ids:
        assert len(set(of_call)) == len(of_call)


async def test_call_that_always_breaks_yields_the_error_of_every_request(ask: Ask) -> None:
    async def break_always(server: Scripted, context: Any) -> None:
        async for _ in server.requests(context):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server stops")

    async with scripted(break_always) as (target, _):
        results = await ask(target)
    assert texts_of(results) == ["UNAVAILABLE"] * len(TEXTS)


async def test_server_that_is_not_there_yields_the_error_of_every_request(ask: Ask) -> None:
    assert texts_of(await ask("127.0.0.1:1")) == ["UNAVAILABLE"] * len(TEXTS)


async def test_leaving_the_iteration_cancels_the_unanswered_requests() -> None:
    async with serving() as served, AsyncClient(served.target) as client:
        async for _ in client.generate_many(TEXTS * 50, concurrency=16):
            break
        # Its steps end them.
        await comes_true(lambda: not (served.engine.num_running or served.engine.num_waiting))


async def test_error_of_the_sources_ends_the_iteration() -> None:
    async def sources() -> AsyncIterator[str]:
        yield "a"
        raise RuntimeError("no more sources")

    async with serving() as served, AsyncClient(served.target) as client:
        with pytest.raises(RuntimeError, match="no more sources"):
            [result async for result in client.generate_many(sources())]
        with pytest.raises(ValueError, match="4294967296"):
            [result async for result in client.generate_many([(1 << 32,)])]


async def test_request_that_is_never_answered_ends_at_the_clients_deadline(ask: Ask) -> None:
    async def answer_others(server: Scripted, context: Any) -> None:
        async for request in server.requests(context):
            if request.request.text != TEXTS[3]:
                await context.write(answered(request))

    async with scripted(answer_others) as (target, _):
        assert texts_of(await ask(target, 1.0)) == [*EXPECTED[:3], "DEADLINE_EXCEEDED", *EXPECTED[4:]]


async def test_time_limit_of_a_request_covers_all_its_attempts(ask: Ask) -> None:
    limits: list[int] = []

    async def refuse_twice(server: Scripted, context: Any) -> None:
        async for request in server.requests(context):
            if request.id == 0:
                limits.append(request.timeout_millis)
            is_early = server.received[request.request.text] < 3
            code = grpc.StatusCode.UNAVAILABLE
            await context.write(refused(request, code) if is_early else answered(request))

    async with scripted(refuse_twice) as (target, _):
        assert texts_of(await ask(target, 60.0)) == EXPECTED
    first, second, third = limits
    assert 60_000 >= first > second > third


async def test_server_that_could_not_say_whether_it_has_the_call_is_asked_again() -> None:
    is_well = False

    async def be_older(server: Scripted, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED if is_well else grpc.StatusCode.UNAVAILABLE, "not here")

    async with scripted(be_older) as (target, server), AsyncClient(target, connection=QUICK) as client:
        assert texts_of([result async for result in client.generate_many(TEXTS)]) == ["UNAVAILABLE"] * len(TEXTS)
        is_well = True
        assert texts_of([result async for result in client.generate_many(TEXTS)]) == EXPECTED
    assert server.num_single == len(TEXTS)


async def counting(stop: int, read: list[int] | None = None) -> AsyncIterator[int]:
    for number in range(stop):
        if read is not None:
            read.append(number)
        yield number


async def test_ordered_map_keeps_order_when_later_items_finish_first() -> None:
    finished = [asyncio.Event() for _ in range(6)]

    async def work(number: int) -> int:
        if number + 1 < len(finished):
            await finished[number + 1].wait()
        finished[number].set()
        return number * 10

    assert [r async for r in ordered_map(counting(6), work, concurrency=6)] == [0, 10, 20, 30, 40, 50]


async def test_ordered_map_never_exceeds_concurrency() -> None:
    active, most = 0, 0

    async def work(number: int) -> int:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0)
        active -= 1
        return number

    assert [r async for r in ordered_map(counting(50), work, concurrency=3)] == list(range(50))
    assert most == 3


async def test_ordered_map_reads_no_input_beyond_its_window_while_the_first_item_is_slow() -> None:
    first, others = asyncio.Event(), asyncio.Semaphore(0)
    read: list[int] = []
    num_allowed = WINDOW_PER_REQUEST * 2 + 1

    async def work(number: int) -> int:
        if number == 0:
            await first.wait()
        others.release()
        return number

    async def release_first() -> None:
        for _ in range(num_allowed - 2):  # every other item of the window
            await others.acquire()
        assert len(read) == num_allowed
        first.set()

    releasing = asyncio.create_task(release_first())
    assert [r async for r in ordered_map(counting(100, read), work, concurrency=2)] == list(range(100))
    await releasing


async def test_ordered_map_raises_the_first_failure_and_cancels_the_rest() -> None:
    was_cancelled = asyncio.Event()

    async def work(number: int) -> int:
        if number == 1:
            raise LookupError("one")
        if number == 2:
            try:
                await asyncio.Event().wait()
            finally:
                was_cancelled.set()
        return number

    results = ordered_map(counting(3), work, concurrency=3)
    assert await anext(results) == 0
    with pytest.raises(LookupError, match="one"):
        await anext(results)
    assert was_cancelled.is_set()


async def test_ordered_map_raises_the_error_of_its_input_after_the_earlier_results() -> None:
    async def broken() -> AsyncIterator[int]:
        yield 1
        raise OSError("gone")

    async def work(number: int) -> int:
        return number

    results = ordered_map(broken(), work, concurrency=2)
    assert await anext(results) == 1
    with pytest.raises(OSError, match="gone"):
        await anext(results)


async def test_ordered_map_cancels_running_work_when_its_consumer_stops_early() -> None:
    num_cancelled = 0

    async def work(number: int) -> int:
        nonlocal num_cancelled
        if number == 0:
            return 0
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            num_cancelled += 1
            raise
        return number

    results = ordered_map(counting(4), work, concurrency=4)
    async for _ in results:
        break
    await asyncio.sleep(0)  # let the others start
    await results.aclose()  # type: ignore[attr-defined]
    assert num_cancelled == 3
