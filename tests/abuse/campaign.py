"""All attacks in random order on one server for a given time, with figures and broken promises at the end."""

import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from antiphon.client import Connection
from tests.abuse.attack import Size
from tests.abuse.attacker import attack_from_elsewhere, attacks
from tests.abuse.honest import Honest
from tests.abuse.identities import Identities
from tests.abuse.trial import Outcome, attacked, sized_bytes
from tests.integration.process import ServerProcess
from tests.reliability.asking import Texts

MAX_LATENCY_S = 2.0
MAX_GROWTH = 0.02
KEPT = 20
"""Complaints of one attack that are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Duration, order and size of a campaign. names: of the attacks; empty takes all."""

    duration_s: float
    seed: int
    size: Size
    names: tuple[str, ...] = ()


@dataclass(kw_only=True, slots=True)
class Row:
    """Results of all rounds of one attack. rest_bytes: memory of the idle server after the last one."""

    rounds: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    honest_calls: int = 0
    peak_bytes: int = 0
    rest_bytes: int = 0
    complaints: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.rounds += 1
        self.ends += outcome.sent.ends
        self.latencies_s += outcome.honest.latencies_s
        self.honest_calls += outcome.honest.sent.total()
        self.peak_bytes = max(self.peak_bytes, outcome.peak_bytes)
        self.rest_bytes = outcome.resident_after
        found = outcome.complaints() + outcome.growth_complaints()
        slowest_s = max(outcome.honest.latencies_s, default=0.0)
        if slowest_s > MAX_LATENCY_S:
            found.append(f"an honest call took {slowest_s:.2f} s, at most {MAX_LATENCY_S:g} s are promised")
        self.complaints += found[: KEPT - len(self.complaints)]

    def figures(self) -> dict[str, Any]:
        """Return the row in the form of the table and the JSON file."""
        latencies = sorted(self.latencies_s) or [0.0]
        return {
            "rounds": self.rounds,
            "honest_calls": self.honest_calls,
            "p50_ms": round(1000 * latencies[len(latencies) // 2], 1),
            "p99_ms": round(1000 * latencies[len(latencies) * 99 // 100], 1),
            "max_ms": round(1000 * latencies[-1], 1),
            "peak_mb": round(self.peak_bytes / 1e6, 1),
            "rest_mb": round(self.rest_bytes / 1e6, 1),
            "ends": dict(self.ends.most_common(8)),
            "complaints": self.complaints,
        }


@dataclass(kw_only=True, slots=True)
class Campaign:
    """Attacks on one server, with their results so far. rests: resident bytes after each attack."""

    server: ServerProcess
    expected: dict[int, Texts]
    identities: Identities | None
    plan: Plan
    rows: dict[str, Row] = field(default_factory=dict)
    rests: list[int] = field(default_factory=list)

    async def run(self) -> None:
        """Attack for the planned time; every attack runs before any is repeated. Raises AssertionError on a crash."""
        rng, end_s = random.Random(self.plan.seed), time.monotonic() + self.plan.duration_s
        names = list(self.plan.names or attacks(self.identities))
        while True:
            for name in rng.sample(names, len(names)):
                if time.monotonic() >= end_s:
                    return
                await self._attack(name)

    async def _attack(self, name: str) -> None:
        connection = Connection() if self.identities is None else self.identities.honest
        honest = Honest(target=self.server.target, expected=self.expected, connection=connection)
        outcome = await attacked(
            self.server, honest, lambda: attack_from_elsewhere(name, self.server.port, self.plan.size, self.identities)
        )
        self.rows.setdefault(name, Row()).add(outcome)
        self.rests.append(outcome.resident_after)

    def figures(self) -> dict[str, Any]:
        return {
            "attacks": sum(row.rounds for row in self.rows.values()),
            "honest_calls": sum(row.honest_calls for row in self.rows.values()),
            "max_ms": max((row.figures()["max_ms"] for row in self.rows.values()), default=0.0),
            "resident_at_rest_mb": [round(held / 1e6, 1) for held in self.rests],
            "peak_mb": max((row.figures()["peak_mb"] for row in self.rows.values()), default=0.0),
            "sized_mb": round(sized_bytes() / 1e6, 1),
            "growth_percent": round(100 * growth(self.rests), 2),
            "by_attack": {name: row.figures() for name, row in sorted(self.rows.items())},
        }

    def complaints(self) -> list[str]:
        found = [f"{name}: {complaint}" for name, row in self.rows.items() for complaint in row.complaints]
        if growth(self.rests) > MAX_GROWTH:
            found.append(f"resident memory at rest grew by {100 * growth(self.rests):.2f} %, at most 2 % are promised")
        return found


def growth(rests: Sequence[int]) -> float:
    """Return the growth of the median of the last fifth over that of the second fifth; the first is the warm-up."""
    part = max(1, len(rests) // 5)
    if len(rests) < 3:
        return 0.0
    return statistics.median(rests[-part:]) / statistics.median(rests[part : 2 * part]) - 1
