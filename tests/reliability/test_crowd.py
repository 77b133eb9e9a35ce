"""Very many concurrent streams, and calls cancelled at random moments: correct answers, and no leaks."""

import asyncio
import random
import time
from collections.abc import Iterator, Sequence

import pytest

from antiphon.client import AsyncClient
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.v1 import inference_pb2 as pb
from tests.integration.process import ServerProcess, is_idle
from tests.reliability.asking import LONG, NUM_KINDS, NUM_LONG_KINDS, Texts, references, streamed
from tests.reliability.footprint import Footprint, check_nothing_is_left, settled, steady
from tests.reliability.sizes import report, size
from tests.reliability.storm import MOMENTS, Storm
from tests.serving import SOURCE, asking, asking_whole, serving, stub_of

pytestmark = pytest.mark.hardship

NUM_STREAMS = size("STREAMS", 64)
NUM_CALLS = size("CALLS", 300)
# Half of them wait while the others run.
AT_ONCE = size("AT_ONCE", 128)
LONG_KINDS = range(LONG, LONG + NUM_LONG_KINDS)
ROOM = ["--max-queued-requests", "20000", "--max-queued-tokens", "10000000", "--max-concurrent-streams", "20000",
        "--max-queue-time-s", "3600"]  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(SHIPPED_BUNDLE, ROOM) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> dict[int, Texts]:
    async def alone() -> dict[int, Texts]:
        async with AsyncClient(server.target) as client:
            return await references(client, [*range(NUM_KINDS), *LONG_KINDS])

    return asyncio.run(alone())


async def at_rest(server: ServerProcess) -> Footprint:
    """Return the resources of the idle server after a first crowd, when its permanent threads have started."""
    async with AsyncClient(server.target) as client:
        await asyncio.gather(*(streamed(client, number) for number in range(NUM_KINDS)))
    await asyncio.to_thread(server.wait_for_metrics, is_idle)
    return await asyncio.to_thread(settled, server.process.pid, steady())


async def test_a_thousand_concurrent_streams_get_the_answers_of_each_alone(
    server: ServerProcess, expected: dict[int, Texts]
) -> None:
    before = await at_rest(server)
    numbers = [LONG_KINDS[index % NUM_LONG_KINDS] for index in range(NUM_STREAMS)]
    begin_s = time.monotonic()
    async with AsyncClient(server.target) as client:
        streams = [asyncio.ensure_future(streamed(client, number)) for number in numbers]
        most = await _most_under_way(server, streams)
        answers = await asyncio.gather(*streams)
    took_s = time.monotonic() - begin_s
    wrong = [number for number, answer in zip(numbers, answers, strict=True) if answer != expected[number]]
    assert wrong == []
    after = await check_nothing_is_left(server, before, ("threads", "descriptors"))
    figures = {"streams": NUM_STREAMS, "most_under_way": most, "seconds": round(took_s, 2), "wrong": len(wrong)}
    report("crowd", figures | {"threads": [before.threads, after.threads]} | _descriptors(before, after))


async def _most_under_way(server: ServerProcess, streams: Sequence[asyncio.Future[Texts]]) -> int:
    """Return the maximum number of waiting and running requests over all scrapes of the server's metrics."""
    most = 0
    while not all(stream.done() for stream in streams):
        metrics = await asyncio.to_thread(server.metrics)
        most = max(most, int(sum(metrics[f"antiphon_num_requests_{state}"] for state in ("waiting", "running"))))
    return most


async def test_cancelled_calls_leave_no_resources_behind(server: ServerProcess, expected: dict[int, Texts]) -> None:
    before = await at_rest(server)
    begin_s = time.monotonic()
    async with AsyncClient(server.target) as client:
        storm = Storm(client=client, expected=expected, rng=random.Random(size("SEED", 5)))
        await storm.rage(NUM_CALLS, at_once=AT_ONCE)
    took_s = time.monotonic() - begin_s
    assert storm.outcomes.total() == NUM_CALLS
    assert {outcome.split(":")[0] for outcome in storm.outcomes} == {*MOMENTS, "to its end"}
    after = await check_nothing_is_left(server, before, ("threads", "descriptors"))
    figures = {"calls": NUM_CALLS, "at_once": AT_ONCE, "seconds": round(took_s, 2), "wrong": 0}
    outcomes = {"outcomes": dict(sorted(storm.outcomes.items()))}
    report("storm", figures | outcomes | {"threads": [before.threads, after.threads]} | _descriptors(before, after))


def _descriptors(before: Footprint, after: Footprint) -> dict[str, list[int]]:
    return {"descriptors": [before.descriptors, after.descriptors]}


async def test_cancelled_calls_leave_no_task_on_the_event_loop_of_the_server() -> None:
    """The server runs in this process, so that the tasks of server and client can be counted."""
    async with serving() as served:
        stub = stub_of(served)
        await stub.GenerateUnary(asking_whole(SOURCE))
        before = len(asyncio.all_tasks())
        rng = random.Random(3)
        for _ in range(50):
            calls = [stub.Generate(asking(SOURCE)) for _ in range(4)]
            for call in calls[: rng.randrange(5)]:
                await call.read()
            for call in calls:
                call.cancel()
        async with asyncio.timeout(30):
            while len(asyncio.all_tasks()) > before:  # some cancellations have not arrived yet
                await stub.Tokenize(pb.TokenizeRequest(text="a"))
