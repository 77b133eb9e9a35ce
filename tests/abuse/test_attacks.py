"""Every attack at a small size: the server survives it, counts its calls and answers honest clients correctly.

Only `make abuse` checks latencies.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from antiphon.server.settings import SHIPPED_BUNDLE
from tests.abuse.attack import Sent, Size
from tests.abuse.attacker import attacks
from tests.abuse.conftest import SIZE
from tests.abuse.handshakes import HANDSHAKES, idle_connections
from tests.abuse.honest import Honest, Record, expected_answers
from tests.abuse.identities import Identities
from tests.abuse.raw_connection import Address
from tests.abuse.trial import attacked
from tests.integration.process import ServerProcess
from tests.marks import marked
from tests.reliability.asking import Texts

# Connections before their first call are closed only by the handshake's time limit, which is far longer than this.
SHORT = replace(SIZE, hold_s=0.3)
ONE_OF_EACH_KIND = [
    "window 0, unary", "headers only, streams", "rapid reset of whole calls", "large messages without their end",
    "flood: PING", "body: gzip bomb", "connection storm", "held connections, silent",
]  # fmt: skip
# A server with TLS gets the same calls; a few of them show that TLS changes nothing.
BEHIND_TLS = [*HANDSHAKES, "strangers", "window 0, unary", "headers only, unary", "rapid reset of whole calls"]


async def check(server: ServerProcess, honest: Honest, attack: Callable[[], Awaitable[Sent]]) -> None:
    """Attack once, and again while memory grows, because an allocator keeps memory of the first bursts for the next."""
    for _ in range(3):
        outcome = await attacked(server, replace(honest, record=Record()), attack)
        assert not (complaints := outcome.complaints()), "\n".join(complaints)
        if not (complaints := outcome.growth_complaints()):
            return
    pytest.fail("\n".join(complaints))


def size_of(name: str) -> Size:
    return SHORT if name in HANDSHAKES else SIZE


@pytest.mark.parametrize("name", marked(attacks(None), "hardship", but=ONE_OF_EACH_KIND))
async def test_server_survives_an_attack_and_answers_others(server: ServerProcess, honest: Honest, name: str) -> None:
    attack, address = attacks(None)[name], Address(port=server.port)
    await check(server, honest, lambda: attack(address, size_of(name)))


@pytest.mark.hardship
@pytest.mark.parametrize("name", BEHIND_TLS)
async def test_server_with_tls_survives_an_attack_and_answers_honest_clients(
    secured: ServerProcess, honest_behind_tls: Honest, identities: Identities, name: str
) -> None:
    attack, address = attacks(identities)[name], Address(port=secured.port, tls=identities.attacker)
    await check(secured, honest_behind_tls, lambda: attack(address, size_of(name)))


@pytest.mark.hardship
async def test_server_answers_connected_clients_when_its_descriptors_are_used_up(expected: dict[int, Texts]) -> None:
    """100 connections with a limit of 96 open files: connected clients are answered, others when idle ones are gone."""
    with ServerProcess(SHIPPED_BUNDLE, prefix=("prlimit", "--nofile=96:96")) as server:
        expected.update(expected or await expected_answers(server.target))
        honest = Honest(target=server.target, expected=expected, has_newcomers=False)
        size = replace(SIZE, storm=100, hold_s=1)

        async def attack() -> Sent:
            await honest.connected.wait()
            return await idle_connections(Address(port=server.port), size)

        await check(server, honest, attack)
        assert await expected_answers(server.target) == expected
