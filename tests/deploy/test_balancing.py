"""Replicas behind the client's round robin, Envoy and nginx, configured as in deploy/balancing/ and docs/SCALING.md.

Every answer is compared with those of each replica without a balancer. Servers and balancers are real; clients are
plain.
"""

import asyncio
import os
from collections.abc import Iterator

import pytest

from tests.deploy.balancers import NAMES, Balancer, balancer
from tests.deploy.calls import Traffic, expected_answers, traffic_through
from tests.deploy.replicas import Replicas

pytestmark = pytest.mark.programs

NUM_REPLICAS = [int(number) for number in os.environ.get("ANTIPHON_BALANCING_REPLICAS", "2").split(",")]
NUM_CALLS = int(os.environ.get("ANTIPHON_BALANCING_CALLS", "200"))
NUM_ROUNDS = int(os.environ.get("ANTIPHON_BALANCING_ROUNDS", "1"))
AT_ONCE = 12
# Minimum of a replica's calls relative to an even share. Two random choices and the start of clients cause differences.
LEAST_SHARE = 0.7
MOST_ROUNDS_UNTIL_EVEN = 10  # of NUM_CALLS

# Longer than Envoy's interval of health checks, their jitter and an answer: see deploy/balancing/envoy.yaml.
DRAIN_DELAY_S = "2.5"


@pytest.fixture(scope="module", params=NUM_REPLICAS, ids=lambda count: f"{count} replicas")
def replicas(request: pytest.FixtureRequest) -> Iterator[Replicas]:
    with Replicas(request.param, ["--drain-delay-s", DRAIN_DELAY_S]) as started:
        yield started


@pytest.mark.parametrize("name", NAMES)
async def test_calls_are_spread_evenly(replicas: Replicas, name: str) -> None:
    expected = await expected_answers(replicas.ports)
    with balancer(name, replicas.ports) as through:
        async with traffic_through(through, expected, AT_ONCE) as traffic:
            await _all_answering(replicas)
            answered = await _answered_until_even(replicas, traffic)
    assert (traffic.lost, traffic.broken_off) == ([], [])
    assert _least_share(answered) >= LEAST_SHARE, answered


@pytest.mark.parametrize("name", NAMES)
async def test_no_call_is_lost_in_a_rolling_restart(replicas: Replicas, name: str) -> None:
    """The client does not retry calls that have reached a server."""
    expected = await expected_answers(replicas.ports)
    with balancer(name, replicas.ports) as through:
        async with traffic_through(through, expected, AT_ONCE) as traffic:
            await _all_answering(replicas)
            for _ in range(NUM_ROUNDS):
                for index in range(len(replicas.ports)):
                    assert await asyncio.to_thread(_restart, replicas, through, index) == 0
    assert (traffic.lost, traffic.broken_off) == ([], [])


@pytest.mark.parametrize("name", NAMES)
async def test_only_streams_that_have_begun_are_lost_when_a_replica_is_killed(replicas: Replicas, name: str) -> None:
    expected = await expected_answers(replicas.ports)
    with balancer(name, replicas.ports) as through:
        async with traffic_through(through, expected, AT_ONCE, through.retrying) as traffic:
            await _all_answering(replicas)
            for index in range(NUM_ROUNDS):
                await _lose(replicas, index % len(replicas.ports), traffic)
    assert traffic.lost == []
    assert len(traffic.broken_off) <= AT_ONCE * NUM_ROUNDS
    assert {outcome.code for outcome in traffic.broken_off} <= {through.broken_off_with}


async def _answered_until_even(replicas: Replicas, traffic: Traffic) -> list[int]:
    """Return each replica's calls, once they are even or there have been many.

    A balancer that counts unanswered calls gives fewer to a replica while the machine delays that replica. Delays are
    equal only over time.
    """
    before = replicas.num_answered()
    for _ in range(MOST_ROUNDS_UNTIL_EVEN):
        await traffic.come_to(NUM_CALLS)
        answered = [after - earlier for after, earlier in zip(replicas.num_answered(), before, strict=True)]
        if _least_share(answered) >= LEAST_SHARE:
            break
    return answered


def _least_share(answered: list[int]) -> float:
    """Return the calls of the replica with the fewest, relative to an even share."""
    return min(answered) / (sum(answered) / len(answered))


async def _all_answering(replicas: Replicas) -> None:
    """Return when calls reach every replica, which needs a connection to each."""
    indices = range(len(replicas.ports))
    await asyncio.gather(*(asyncio.to_thread(replicas.wait_until_answering, index) for index in indices))


def _restart(replicas: Replicas, through: Balancer, index: int) -> int:
    """Remove one replica, stop it as an orchestrator does, and start another in its place. Return the exit code."""
    through.take_out(index)
    code = replicas.leave(index)
    replicas.restart(index)
    through.put_back(index)
    replicas.wait_until_answering(index)
    return code


async def _lose(replicas: Replicas, index: int, traffic: Traffic) -> None:
    """Kill a busy replica. Traffic continues without it, and reaches its replacement."""
    await asyncio.to_thread(replicas.wait_until_busy, index)
    replicas.kill(index)
    await traffic.come_to(NUM_CALLS)
    await asyncio.to_thread(replicas.restart, index)
    await asyncio.to_thread(replicas.wait_until_answering, index)
