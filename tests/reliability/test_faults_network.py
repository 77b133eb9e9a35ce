"""A network with packet loss between two namespaces: every answer is correct, and every call ends."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from antiphon.server.settings import SHIPPED_BUNDLE
from tests.integration.process import PATIENCE_S, ServerProcess, environment
from tests.reliability.footprint import check_as_before, settled, steady
from tests.reliability.lossy_link import LossyLink, why_not
from tests.reliability.sizes import report, size

NUM_CALLS = size("FAULT_CALLS", 60)
LOSS = 0.05
pytestmark = [pytest.mark.hardship, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


@pytest.fixture
def link() -> Iterator[LossyLink]:
    with LossyLink(seed=1) as link:
        yield link


def serving(link: LossyLink, *arguments: str) -> ServerProcess:
    """Run a server in the near namespace."""
    return ServerProcess(SHIPPED_BUNDLE, ["--host", link.near_address, *arguments], prefix=link.inside(link.near))


def client(link: LossyLink, *arguments: str) -> subprocess.Popen[str]:
    command = [*link.inside(link.far), sys.executable, "-m", "tests.reliability.client_process", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment())


def test_answers_are_right_while_packets_are_lost(link: LossyLink) -> None:
    """Keepalive has its default settings, because short ping timeouts would close connections after lost packets."""
    with serving(link) as server, client(link, "compare", server.target, str(NUM_CALLS)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        link.loss = LOSS
        out, errors = process.communicate("\n", timeout=PATIENCE_S)
        link.loss = 0.0
    assert process.returncode == 0, errors
    outcomes = json.loads(out)
    assert sum(outcomes.values()) == NUM_CALLS
    assert link.num_lost > 0
    figures = {"calls": NUM_CALLS, "loss_percent": 100 * LOSS, "packets_lost": link.num_lost, "outcomes": outcomes}
    report("packet-loss", figures)


async def test_calls_are_ended_when_the_network_is_lost(link: LossyLink) -> None:
    with serving(link, "--keepalive-time-s", "1", "--keepalive-timeout-s", "0.5") as server:
        # 8 streams run when the network is cut.
        before = await asyncio.to_thread(settled, server.process.pid, steady())
        with client(link, "endless", server.target, "8") as process:
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == "first\n"
            link.loss = 1.0  # neither end learns that the connection has ended
            await check_as_before(server, before)
            process.kill()
