"""Every attack by its name."""

from __future__ import annotations

from tests.abuse.attack import Attack
from tests.abuse.bodies import BODIES
from tests.abuse.floods import FLOODS
from tests.abuse.handshakes import HANDSHAKES, strangers
from tests.abuse.identities import Identities
from tests.abuse.streams import STREAM_ATTACKS


def attacks(identities: Identities | None) -> dict[str, Attack]:
    """Return the attacks on a server by name. identities: of a server with mutual TLS, for attacks with wrong ones."""
    found = {
        **STREAM_ATTACKS,
        **{f"flood: {name}": attack for name, attack in FLOODS.items()},
        **{f"body: {name}": attack for name, attack in BODIES.items()},
        **HANDSHAKES,
    }
    if identities is not None:
        found["strangers"] = strangers(identities.strangers)
    return found
