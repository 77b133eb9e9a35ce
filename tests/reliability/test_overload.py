"""Far more than a server can do, for a moment: what it takes it answers, what it does not it refuses with advice.

Rates and latencies are for the long run to judge (make overload).
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from antiphon.load.drive import drive
from antiphon.load.plan import Ask, Plan
from antiphon.load.workload.texts import EVERYDAY
from antiphon.service.server.settings import SHIPPED_BUNDLE
from tests.integration.process import ServerProcess, is_idle
from tests.reliability.overload import REFUSED
from tests.reliability.sizes import size

# Two rows at a time, and room for two more: a crowd has no chance.
SMALL = ["--max-num-seqs", "2", "--max-queued-requests", "2"]
RATE_PER_S = 150.0


async def test_overload_is_refused_with_advice_and_what_is_taken_is_answered() -> None:
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
