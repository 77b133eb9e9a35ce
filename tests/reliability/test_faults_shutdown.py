"""SIGTERM under load: admitted requests are answered, later ones are refused, and the process exits with 0."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

import grpc

from antiphon.client import AsyncClient, Connection, ServerError
from antiphon.client.connection import RetryPolicy
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.integration.process import ServerProcess
from tests.marks import hardship
from tests.reliability.asking import LASTING, references, streamed, whole
from tests.reliability.sizes import size
from tests.reliability.summary import report

pytestmark = hardship

NUM_CALLS = size("FAULT_CALLS", 60) * 2
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
