"""Calls that hold on to a server: it ends every one of them in time, counts it, and answers everybody else."""

from __future__ import annotations

import pytest

from tests.abuse.attack import Size
from tests.abuse.calls import HEALTH_METHOD, REFLECTION_METHOD, STREAM, UNARY, UNKNOWN_METHOD, UNKNOWN_SERVICE_METHOD
from tests.abuse.honest import Honest
from tests.abuse.raw_connection import Address
from tests.abuse.streams import STREAM_ATTACKS, headers_only
from tests.abuse.trial import attacked
from tests.integration.process import ServerProcess

# 4 connections hold 240 calls, where the server takes 128 and the time for a slow client is a second.
SIZE = Size(connections=4, calls=60, hold_s=10, interval_s=0.1)


@pytest.mark.parametrize("name", STREAM_ATTACKS)
async def test_server_ends_and_counts_what_an_attacker_holds(
    server: ServerProcess, honest: Honest, address: Address, name: str
) -> None:
    outcome = await attacked(server, honest, lambda: STREAM_ATTACKS[name](address, SIZE))
    assert not (found := outcome.complaints()), "\n".join(found)


@pytest.mark.parametrize(
    "method", [UNARY.method, STREAM.method, HEALTH_METHOD, REFLECTION_METHOD, UNKNOWN_METHOD, UNKNOWN_SERVICE_METHOD]
)
async def test_server_ends_calls_whose_message_never_comes(
    server: ServerProcess, honest: Honest, address: Address, method: str
) -> None:
    outcome = await attacked(server, honest, lambda: headers_only(method)(address, SIZE))
    assert not (found := outcome.complaints()), "\n".join(found)
