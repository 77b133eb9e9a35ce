"""One attack on a real server with honest clients, from idle to idle, and the promises that must hold."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache

from antiphon.domain.limits import EngineLimits
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.tools.capacity.sizing import Lengths, Replica, open_profiled, size
from tests.abuse import accounts
from tests.abuse.accounts import Expected
from tests.abuse.attack import Sent
from tests.abuse.honest import Honest, Record
from tests.integration.process import ServerProcess, is_idle
from tests.reliability.footprint import Footprint, peak_bytes, reset_peak, settled

MAX_GROWTH = 0.10
REST_PATIENCE_S = 60
# Caches of idle models are freed after 20 s, the heap of a busy one is trimmed every 2 s and of an idle one less often.
MEMORY_PATIENCE_S = 90
LOOK_S = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """Metrics and memory of an idle server."""

    metrics: Mapping[str, float]
    held: Footprint


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Outcome of one attack: its report, the results of honest clients, and metrics and memory of the server.

    limit_bytes: memory limit that `antiphon size` prints for one worker.
    """

    sent: Sent
    honest: Record
    grown: Mapping[str, Counter[str]]
    in_flight: int
    resident_before: int
    resident_after: int
    peak_bytes: int
    limit_bytes: int

    def complaints(self) -> list[str]:
        """Return a message for every broken promise except that on memory."""
        found = [*self.sent.breaches, *self.honest.complaints, *accounts.complaints(self.grown, self._expected())]
        found += self._false_successes()
        if self.sent.num_left_open:
            found.append(f"the server left {self.sent.num_left_open} calls open: {dict(self.sent.ends)}")
        if self.peak_bytes > self.limit_bytes:
            found.append(f"memory had {self.peak_bytes} bytes; `antiphon size` says {self.limit_bytes}")
        if self.in_flight:
            found.append(f"{self.in_flight} calls are in flight although no client has one")
        return found

    @property
    def growth(self) -> float:
        """Relative growth of resident memory, from idle to idle.

        The allocator keeps some memory of the first burst. A leak grows by the same amount every time.
        """
        return self.resident_after / self.resident_before - 1

    def growth_complaints(self) -> list[str]:
        """Return a message if memory grew too much in an attack that is not the first of its kind."""
        if self.growth <= MAX_GROWTH:
            return []
        return [f"resident memory grew from {self.resident_before} to {self.resident_after} bytes"]

    def _false_successes(self) -> list[str]:
        """Return a message for every method with more calls counted as OK than clients received."""
        if not self.sent.ends:  # the attacker read nothing
            return []
        found = []
        for method in self.sent.whole:
            counted = self.grown.get(method, Counter())["OK"]
            seen = self.sent.ends["OK"] + self.sent.partial[method] + self.honest.sent[method]
            if counted > seen:
                found.append(f"{method}: {counted} calls counted as OK, clients saw at most {seen}: {self.sent.ends}")
        return found

    def _expected(self) -> dict[str, Expected]:
        whole, partial, honest = self.sent.whole, self.sent.partial, self.honest
        return {
            method: Expected(
                least=whole[method] + honest.answered[method],
                most=whole[method] + partial[method] + honest.sent[method],
            )
            for method in self.grown
        }


@cache
def sized_bytes() -> int:
    """Return the memory limit that `antiphon size` prints for the shipped bundle and one worker."""
    replica = Replica(cores=1, workers=1, limits=EngineLimits(), lengths=Lengths(source=None, target=None))
    return size(open_profiled(SHIPPED_BUNDLE), replica, None, None).footprint.limit_bytes


async def attacked(server: ServerProcess, honest: Honest, attack: Callable[[], Awaitable[Sent]]) -> Outcome:
    """Run an attack with honest clients, wait until the server is idle again, and return the outcome."""
    before = await at_rest(server)
    reset_peak(server.process.pid)
    attacking = asyncio.ensure_future(attack())
    await honest.ask_beside(attacking)
    check_alive(server)
    after = await at_rest(server, before)
    return Outcome(
        sent=attacking.result(),
        honest=honest.record,
        grown=accounts.growth(before.metrics, after.metrics),
        in_flight=accounts.in_flight(after.metrics),
        resident_before=before.held.resident_bytes,
        resident_after=after.held.resident_bytes,
        peak_bytes=peak_bytes(server.process.pid),
        limit_bytes=sized_bytes(),
    )


def check_alive(server: ServerProcess) -> None:
    """Raise AssertionError with the last output of the server if it has ended."""
    if server.process.poll() is not None:
        code, errors = server.finish()
        raise AssertionError(f"the server ended with {code}: {errors[-2000:]}")


async def at_rest(server: ServerProcess, before: Rest | None = None) -> Rest:
    """Wait in another thread until no call is in flight, and memory is as before or the time limit passes."""
    return await asyncio.to_thread(_rest, server, before)


def _rest(server: ServerProcess, before: Rest | None) -> Rest:
    end_s = time.monotonic() + REST_PATIENCE_S
    metrics = server.metrics()
    while not (is_idle(metrics) and accounts.in_flight(metrics) == 0) and time.monotonic() < end_s:
        time.sleep(LOOK_S)  # another process reports no event, so it is polled
        metrics = server.metrics()

    def is_back(held: Footprint) -> bool:
        return before is None or held.resident_bytes <= before.held.resident_bytes * (1 + MAX_GROWTH)

    return Rest(metrics=metrics, held=settled(server.process.pid, is_back, patience_s=MEMORY_PATIENCE_S))
