"""Floods of frames: the server closes the connection or stands them, and answers everybody else."""

from __future__ import annotations

import pytest

from tests.abuse.attack import Size
from tests.abuse.floods import FLOODS
from tests.abuse.honest import Honest
from tests.abuse.raw_connection import Address
from tests.abuse.trial import attacked
from tests.integration.process import ServerProcess


@pytest.mark.parametrize("name", FLOODS)
async def test_server_answers_beside_a_flood(
    server: ServerProcess, honest: Honest, address: Address, size: Size, name: str
) -> None:
    outcome = await attacked(server, honest, lambda: FLOODS[name](address, size))
    assert not (found := outcome.complaints()), "\n".join(found)
