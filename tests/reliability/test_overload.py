"""Short runs of the overload and of the endurance run.

Only the long ones (make overload, make endurance) check rates, latencies and memory.
"""

import asyncio
from dataclasses import replace

import pytest

from antiphon.load.drive import drive
from antiphon.load.plan import Ask, Plan
from antiphon.load.workload import EVERYDAY
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.integration.process import ServerProcess, is_idle
from tests.reliability import endurance
from tests.reliability.overload import REFUSED
from tests.reliability.sizes import size

# Two rows, and a queue of two requests.
SMALL = ["--max-num-seqs", "2", "--max-queued-requests", "2"]
RATE_PER_S = 150.0


async def test_overload_is_refused_with_pushback_and_accepted_requests_are_answered() -> None:
    plan = Plan(
        asks=tuple(Ask(source=text, max_new_tokens=64) for text in EVERYDAY[:5]),
        rate=RATE_PER_S,
        duration_s=size("OVERLOAD_S", 3),
        ignore_eos=True,
        check=True,
    )
    with ServerProcess(SHIPPED_BUNDLE, SMALL) as server:
        result = await drive(replace(plan, target=server.target))
        await asyncio.to_thread(server.wait_for_metrics, is_idle)
    assert set(result.errors) == {REFUSED}
    assert result.num_pushbacks == result.errors[REFUSED]
    assert result.num_ok > 0
    assert result.record.num_mismatches == 0
    assert result.num_ok + result.errors[REFUSED] == result.num_sent == result.num_scheduled


@pytest.mark.hardship
async def test_mixed_traffic_leaves_no_resources_behind() -> None:
    plan = endurance.Plan(duration_s=size("ENDURANCE_S", 4), warm_up_s=1, rate_per_s=25, sample_s=0.5)
    with ServerProcess(SHIPPED_BUNDLE) as server:
        figures = await endurance.endure(server, plan)
    assert endurance.complaints(figures) == []
    assert figures["calls"] > plan.duration_s
