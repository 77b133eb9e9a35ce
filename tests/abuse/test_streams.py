"""Calls that hold on to a server: it ends every one of them in time, counts it, and answers everybody else."""

from __future__ import annotations

import pytest

from tests.abuse.attack import Size
from tests.abuse.honest import Honest
from tests.abuse.raw_connection import Address
from tests.abuse.streams import STREAM_ATTACKS
from tests.abuse.trial import attacked
from tests.integration.process import ServerProcess


@pytest.mark.parametrize("name", STREAM_ATTACKS)
async def test_server_ends_and_counts_what_an_attacker_holds(
    server: ServerProcess, honest: Honest, address: Address, size: Size, name: str
) -> None:
    outcome = await attacked(server, honest, lambda: STREAM_ATTACKS[name](address, size))
    assert not (found := outcome.complaints()), "\n".join(found)
