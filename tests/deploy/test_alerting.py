"""Alerts fire and resolve through a real Alertmanager for real faults. Only the fast ones are tested here.

`make alerts-check` tests all of them; its output is docs/alerts-check.txt.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.faults import killed, stuck
from tests.deploy.proof import Fault, prove
from tests.deploy.watching import Watch, watching

pytestmark = pytest.mark.programs

# Five minutes become two and a half seconds. With shorter times the shortest range, 2 minutes, has under four scrapes.
SCALE = 120


@pytest.fixture(scope="module")
def watch() -> Iterator[Watch]:
    with watching(SCALE, scrape_ms=250) as watch:
        yield watch
        assert watch.rule_errors() == []


@pytest.mark.parametrize("fault", [killed, stuck], ids=lambda fault: fault.name)
def test_alerts_fire_for_a_fault_and_resolve_after_its_repair(fault: Fault, watch: Watch, tmp_path: Path) -> None:
    proofs = prove(fault, watch, tmp_path)
    assert {proof.alert for proof in proofs} == {*fault.alerts}
    assert all("<" not in proof.description for proof in proofs)  # <no value>, <error expanding template ...>
