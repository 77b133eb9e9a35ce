"""Servers to attack: the shipped bundle, with limits so small that a small attack reaches them."""

from collections.abc import Iterator, Sequence

import pytest

from antiphon.server.settings import SHIPPED_BUNDLE
from tests.abuse.attack import Size
from tests.abuse.honest import Honest, expected_answers
from tests.abuse.identities import Identities, Issuer
from tests.abuse.raw_connection import Address
from tests.abuse.streams import calls_that_are_read
from tests.integration.process import ServerProcess
from tests.reliability.asking import Texts

# An attack has more calls than the first two limits.
FLAGS = [
    "--max-concurrent-rpcs=128", "--max-concurrent-streams=64", "--slow-reader-timeout-s=1",
    "--request-timeout-s=1", "--keepalive-time-s=2", "--keepalive-timeout-s=1",
]  # fmt: skip
# 3 connections have 180 calls.
SIZE = Size(connections=3, calls=60, frames=500, storm=25, hold_s=8, unread_s=2)


class Standing:
    """Server of many tests. It is replaced only after its end, and already uses all memory that it needs."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._process: ServerProcess | None = None

    def is_running(self) -> bool:
        return self._process is not None and self._process.process.poll() is None

    def start(self) -> ServerProcess:
        """Start the server, as replacement of one that has ended."""
        self.close()
        self._process = ServerProcess(SHIPPED_BUNDLE, self._arguments)
        return self._process

    @property
    def process(self) -> ServerProcess:
        assert self._process is not None
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.__exit__(None, None, None)


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    return Issuer(tmp_path_factory.mktemp("identities")).identities


@pytest.fixture(scope="session")
def standing() -> Iterator[Standing]:
    found = Standing(FLAGS)
    yield found
    found.close()


@pytest.fixture(scope="session")
def standing_secured(identities: Identities) -> Iterator[Standing]:
    found = Standing([*FLAGS, *identities.flags])
    yield found
    found.close()


@pytest.fixture
async def server(standing: Standing) -> ServerProcess:
    if not standing.is_running():
        await calls_that_are_read(Address(port=standing.start().port), SIZE)
    return standing.process


@pytest.fixture
async def secured(standing_secured: Standing, identities: Identities) -> ServerProcess:
    if not standing_secured.is_running():
        await calls_that_are_read(Address(port=standing_secured.start().port, tls=identities.attacker), SIZE)
    return standing_secured.process


@pytest.fixture(scope="session")
def expected() -> dict[int, Texts]:
    """Request the expected answers once: every server of one bundle gives the same."""
    return {}


@pytest.fixture
async def honest(server: ServerProcess, expected: dict[int, Texts]) -> Honest:
    expected.update(expected or await expected_answers(server.target))
    return Honest(target=server.target, expected=expected)


@pytest.fixture
async def honest_behind_tls(secured: ServerProcess, identities: Identities, expected: dict[int, Texts]) -> Honest:
    expected.update(expected or await expected_answers(secured.target, identities.honest))
    return Honest(target=secured.target, expected=expected, connection=identities.honest)
