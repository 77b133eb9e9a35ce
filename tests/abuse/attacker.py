"""One attack from a separate process, so that it does not delay the honest clients of the test process.

    python -m tests.abuse.attacker '{"name": "flood: PING", "port": 50051, "size": {...}, "identities": null}'

Prints the report of the attack as JSON.
"""

import asyncio
import json
import logging
import resource
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tests.abuse.attack import Attack, Sent, Size
from tests.abuse.bodies import BODIES
from tests.abuse.floods import FLOODS
from tests.abuse.handshakes import HANDSHAKES, strangers
from tests.abuse.identities import Identities
from tests.abuse.raw_connection import Address
from tests.abuse.streams import STREAM_ATTACKS
from tests.integration.process import environment


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


async def attack_from_elsewhere(name: str, port: int, size: Size, identities: Identities | None) -> Sent:
    """Run an attack in another process and return its report. Raises AssertionError if that process fails."""
    order = {
        "name": name, "port": port, "size": asdict(size),
        "identities": None if identities is None else str(identities.folder),
    }  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, json.dumps(order), stdout=asyncio.subprocess.PIPE, env=environment()
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, f"the attacker of {name!r} ended with {process.returncode}"
    return _as_sent(json.loads(output))


def _as_sent(given: Mapping[str, Any]) -> Sent:
    counts = {field: Counter(given[field]) for field in ("whole", "partial", "ends")}
    return Sent(**counts, breaches=tuple(given["breaches"]))


def main() -> None:
    order = json.loads(sys.argv[1])
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it logs a warning for every write to a closed connection
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    identities = None if order["identities"] is None else Identities(Path(order["identities"]))
    address = Address(port=order["port"], tls=None if identities is None else identities.attacker)
    sent = asyncio.run(_attack(order["name"], address, Size(**order["size"]), identities))
    # Not asdict, which turns a Counter of pairs into a count of pairs.
    json.dump({field.name: getattr(sent, field.name) for field in fields(sent)}, sys.stdout)


async def _attack(name: str, address: Address, size: Size, identities: Identities | None) -> Sent:
    return await attacks(identities)[name](address, size)


if __name__ == "__main__":
    main()
