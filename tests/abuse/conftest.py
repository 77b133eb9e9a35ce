"""A server to attack: the shipped bundle, with limits so small that a small attack reaches them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from antiphon.service.config import SHIPPED_BUNDLE
from tests.abuse.attack import Size
from tests.abuse.honest import Honest, expected_answers
from tests.abuse.raw_connection import Address
from tests.integration.process import ServerProcess

# The calls of an attack are more than these.
LIMITS = ["--max-concurrent-rpcs=128", "--max-concurrent-streams=64"]
TIMES = ["--slow-reader-timeout-s=1", "--request-timeout-s=1", "--keepalive-time-s=2", "--keepalive-timeout-s=1"]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(SHIPPED_BUNDLE, [*LIMITS, *TIMES]) as process:
        yield process


@pytest.fixture
def address(server: ServerProcess) -> Address:
    return Address(port=server.port)


@pytest.fixture
async def honest(server: ServerProcess) -> Honest:
    return Honest(target=server.target, expected=await expected_answers(server.target))


@pytest.fixture(scope="session")
def size() -> Size:
    """4 connections hold 240 calls, where the server takes 128 and the time for a slow client is a second."""
    return Size(connections=4, calls=60, frames=1000, storm=50, hold_s=8)
