"""Messages that are not what they say: each call is refused and counted, and everybody else is answered."""

from __future__ import annotations

import pytest

from tests.abuse.attack import Size
from tests.abuse.bodies import BODIES
from tests.abuse.honest import Honest
from tests.abuse.raw_connection import Address
from tests.abuse.trial import attacked
from tests.integration.process import ServerProcess


@pytest.mark.parametrize("name", BODIES)
async def test_server_refuses_and_counts_a_bad_message(
    server: ServerProcess, honest: Honest, address: Address, size: Size, name: str
) -> None:
    outcome = await attacked(server, honest, lambda: BODIES[name](address, size))
    assert not (found := outcome.complaints()), "\n".join(found)
    assert "OK" not in outcome.sent.ends
