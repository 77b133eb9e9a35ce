"""Replicas that are killed or terminated under load: no call without a first message is lost."""

import asyncio
import signal
from collections import Counter, defaultdict
from collections.abc import Sequence

import grpc
import pytest

from antiphon.client import AsyncClient, Connection, ServerError
from antiphon.client.connection import RetryPolicy
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.integration.process import ServerProcess
from tests.reliability.asking import LASTING, Heard, Texts, references, streamed, whole
from tests.reliability.sizes import report, size

pytestmark = pytest.mark.hardship

NUM_CALLS = size("FAULT_CALLS", 60) * 2
FEW_ROWS = ["--max-num-seqs", "8", "--max-queue-time-s", "3600"]  # most calls wait in the queue
# All calls at the killed replica can fail at once, so no retry budget must limit them.
CONNECTION = Connection(load_balancing="round_robin", retry=RetryPolicy(budget=None))


async def test_no_call_that_has_not_begun_is_lost_when_a_replica_is_killed() -> None:
    with ServerProcess(SHIPPED_BUNDLE, FEW_ROWS) as kept, ServerProcess(SHIPPED_BUNDLE, FEW_ROWS) as lost:
        async with AsyncClient(kept.target) as client:
            expected = await references(client, sorted(set(LASTING)))
        target = f"ipv4:127.0.0.1:{kept.port},127.0.0.1:{lost.port}"
        async with AsyncClient(target, connection=CONNECTION) as client:
            await _both_connected(client, lost)
            outcomes = await _with_a_death_in_the_middle(client, lost, expected)
    assert outcomes.total() == NUM_CALLS
    assert outcomes["lost before it began"] == 0
    report("replicas", {"calls": NUM_CALLS, "outcomes": dict(outcomes)})


async def _both_connected(client: AsyncClient, lost: ServerProcess) -> None:
    """Call until the replica that will be killed has answered, because calls need an open connection."""
    while lost.metrics()["antiphon_prompt_tokens_total"] == 0:
        await whole(client, 0)


async def _with_a_death_in_the_middle(
    client: AsyncClient, lost: ServerProcess, expected: dict[int, Texts]
) -> Counter[str]:
    """Make all calls at once, and kill one replica while some of its requests run and others wait."""
    calls = [asyncio.ensure_future(_call(client, number, expected)) for number in range(NUM_CALLS)]
    await asyncio.to_thread(lost.wait_for_metrics, _is_busy)
    lost.process.send_signal(signal.SIGKILL)
    return Counter(await asyncio.gather(*calls))


def _is_busy(metrics: dict[str, float]) -> bool:
    return min(metrics["antiphon_num_requests_running"], metrics["antiphon_num_requests_waiting"]) > 0


async def _call(client: AsyncClient, number: int, expected: dict[int, Texts]) -> str:
    """Make one call. Every third one is unary, which has no message before its end."""
    kind, heard = LASTING[number % len(LASTING)], Heard(defaultdict(str))
    try:
        answer = await (whole(client, kind) if number % 3 == 0 else streamed(client, kind, heard=heard))
    except ServerError as error:
        if error.code is not grpc.StatusCode.UNAVAILABLE or not heard.is_beginning_of(expected[kind]):
            raise
        if heard.messages and error.request_id is None:  # headers precede the first message
            raise
        # The id comes with the headers, right before the first message: after them gRPC sends no call again.
        return "broken off in mid-stream" if error.request_id is not None else "lost before it began"
    assert answer == expected[kind]
    return "answered"


ARGUMENTS = ["--max-num-seqs", "8", "--max-queue-time-s", "3600",  # most calls wait in the queue
             "--drain-grace-s", "600"]  # fmt: skip
NO_RETRIES = Connection(retry=RetryPolicy(attempts=1))


async def test_sigterm_under_load_loses_no_admitted_request() -> None:
    with ServerProcess(SHIPPED_BUNDLE, ARGUMENTS) as server:
        async with AsyncClient(server.target, connection=NO_RETRIES) as client:
            expected = await references(client, sorted(set(LASTING)))
            asked = [LASTING[number % len(LASTING)] for number in range(NUM_CALLS)]
            calls = [
                asyncio.ensure_future((whole if number % 3 == 0 else streamed)(client, kind))
                for number, kind in enumerate(asked)
            ]
            waiting = await asyncio.to_thread(_all_admitted, server)
            server.process.send_signal(signal.SIGTERM)
            refused = await _refusals(client, calls)
            answers = await asyncio.gather(*calls)
        code, errors = await asyncio.to_thread(server.finish)
    assert [answer == expected[kind] for answer, kind in zip(answers, asked, strict=True)] == [True] * NUM_CALLS
    assert refused > 0
    assert (code, "Traceback" in errors) == (0, False)
    report("sigterm", {"calls": NUM_CALLS, "waiting_at_sigterm": waiting, "refused_later": refused, "lost": 0})


def _all_admitted(server: ServerProcess) -> int:
    """Wait until every call has been admitted. Return the number of requests that wait for a row."""

    def is_there(metrics: dict[str, float]) -> bool:
        ended = sum(value for name, value in metrics.items() if name.startswith("antiphon_request_success_total"))
        under_way = sum(metrics[f"antiphon_num_requests_{state}"] for state in ("waiting", "running"))
        return ended + under_way >= len(set(LASTING)) + NUM_CALLS and under_way > 0

    return int(server.wait_for_metrics(is_there)["antiphon_num_requests_waiting"])


async def _refusals(client: AsyncClient, calls: Sequence[asyncio.Future[tuple[str, ...]]]) -> int:
    """Send requests until all other calls have ended. Return the number of refusals; the first requests can succeed."""
    num_refused = 0
    while not all(call.done() for call in calls):
        try:
            await client.generate_text("Stop!")
        except ServerError as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                raise
            num_refused += 1
    return num_refused
