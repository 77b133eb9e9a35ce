"""Every attack in random order on a real server with honest clients: `make abuse`.

    python -m tests.abuse --minutes 60 --tls --rotate-s 60

The results are a table and build/abuse/abuse.json. The exit code is 1 if a promise did not hold.
"""

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from antiphon.server.settings import SHIPPED_BUNDLE
from tests.abuse.attack import Size
from tests.abuse.campaign import Campaign, Plan
from tests.abuse.honest import expected_answers
from tests.abuse.identities import Issuer
from tests.abuse.raw_connection import Address
from tests.abuse.streams import calls_that_are_read
from tests.integration.process import ServerProcess
from tests.reliability.sizes import report

FOLDER = Path(__file__).parents[2] / "build" / "abuse"
# 5 connections have 5,100 calls, more than max_concurrent_rpcs; the times are longer than the server's time limits.
SIZE = Size(connections=5, calls=1020, frames=20_000, storm=500, hold_s=60, unread_s=45, interval_s=0.5)


def main() -> int:
    flags = _flags()
    with tempfile.TemporaryDirectory() as folder:
        issuer = Issuer(Path(folder)) if flags.tls else None
        arguments = [*([] if issuer is None else issuer.identities.flags), *flags.serve]
        with ServerProcess(SHIPPED_BUNDLE, arguments) as server:
            return asyncio.run(_run(server, issuer, flags))


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.abuse", description="Attack a real server at length.")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1, help="of the order of the attacks")
    parser.add_argument("--tls", action="store_true", help="serve under mutual TLS")
    parser.add_argument("--rotate-s", type=float, default=60, help="time after which the certificate is renewed")
    parser.add_argument("--attack", action="append", default=[], help="name of an attack, again for each; default all")
    parser.add_argument("--serve", action="append", default=[], help="a flag of the server, --serve=--threads=2")
    return parser.parse_args()


async def _run(server: ServerProcess, issuer: Issuer | None, flags: argparse.Namespace) -> int:
    identities = None if issuer is None else issuer.identities
    address = Address(port=server.port, tls=None if identities is None else identities.attacker)
    connection = None if identities is None else identities.honest
    expected = await expected_answers(server.target, connection)
    await calls_that_are_read(address, SIZE)
    plan = Plan(duration_s=60 * flags.minutes, seed=flags.seed, size=SIZE, names=tuple(flags.attack))
    campaign = Campaign(server=server, expected=expected, identities=identities, plan=plan)
    crash: list[str] = []
    async with _rotating(issuer, flags.rotate_s):
        try:
            await campaign.run()
        except AssertionError as error:
            crash.append(str(error))
    complaints = [*crash, *campaign.complaints()]
    figures = campaign.figures() | {"minutes": flags.minutes, "is_tls": flags.tls, "seed": flags.seed}
    path = report("abuse", figures | {"complaints": complaints}, is_quiet=True, folder=FOLDER)
    print(_table(figures), f"figures: {path}", *complaints, sep="\n")
    return 1 if complaints else 0


@contextlib.asynccontextmanager
async def _rotating(issuer: Issuer | None, interval_s: float) -> AsyncIterator[None]:
    """Renew the server's certificate at every interval until the context exits."""

    async def rotate(issuer: Issuer) -> None:
        while True:
            await asyncio.sleep(interval_s)
            await asyncio.to_thread(issuer.renew)

    tasks = set() if issuer is None else {asyncio.ensure_future(rotate(issuer))}
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _table(figures: dict[str, Any]) -> str:
    columns = ("rounds", "honest_calls", "p50_ms", "p99_ms", "max_ms", "peak_mb", "rest_mb")
    width = max((len(name) for name in figures["by_attack"]), default=10)
    lines = [" ".join([f"{'attack':{width}}", *(f"{column:>12}" for column in columns), "ends"])]
    for name, row in figures["by_attack"].items():
        ends = ", ".join(f"{end} {number}" for end, number in row["ends"].items())
        lines.append(" ".join([f"{name:{width}}", *(f"{row[column]:>12}" for column in columns), ends]))
    names = ("attacks", "honest_calls", "max_ms", "peak_mb", "sized_mb", "growth_percent")
    total = ", ".join(f"{name} {figures[name]}" for name in names)
    return "\n".join([*lines, total])


if __name__ == "__main__":
    sys.exit(main())
