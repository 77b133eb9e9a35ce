"""A few seconds of the endurance run: correct answers, and no thread or descriptor left after the clients.

Memory is checked only by the long run (make endurance), because it cannot be judged within seconds.
"""

from __future__ import annotations

from antiphon.server.settings import SHIPPED_BUNDLE
from tests.integration.process import ServerProcess
from tests.marks import hardship
from tests.reliability.endurance import Plan, complaints, endure
from tests.reliability.sizes import size

pytestmark = hardship


async def test_mixed_traffic_leaves_no_resources_behind() -> None:
    plan = Plan(duration_s=size("ENDURANCE_S", 4), warm_up_s=1, rate_per_s=25, sample_s=0.5)
    with ServerProcess(SHIPPED_BUNDLE) as server:
        figures = await endure(server, plan)
    assert complaints(figures) == []
    assert figures["calls"] > plan.duration_s
