"""Proof of an alert: Alertmanager reports a caused fault, and then reports its repair."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from antiphon.server.settings import SHIPPED_BUNDLE
from tests.deploy.watching import Watch
from tests.integration.process import ServerProcess

Cure = Callable[[], object]
# Notices come within seconds; what must leave a range of an hour takes a minute of scaled time.
PATIENCE_S = 300
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Environment of a fault: Prometheus and Alertmanager, a folder, and the name of its monitored server."""

    watch: Watch
    folder: Path
    name: str

    def server(
        self, *arguments: str, bundle: Path = SHIPPED_BUNDLE, prefix: tuple[str, ...] = (), metrics_port: int = 0
    ) -> ServerProcess:
        """Start a real server and monitor it."""
        flags = [*arguments, "--access-log", "none", "--metrics-port", str(metrics_port)]
        server = ServerProcess(bundle, flags, prefix=prefix)
        self.watch.targets({self.name: server.metrics_port})
        return server

    def seen(self, server: ServerProcess) -> None:
        """Wait until Prometheus has scraped this very process."""
        began_s = server.metrics()["process_start_time_seconds"]
        self.wait(f"{self.began} == {began_s}")

    @property
    def began(self) -> str:
        """Return an expression for the start time of the server's process."""
        return f'process_start_time_seconds{{instance="{self.name}"}}'

    def wait(self, expression: str) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not self.watch.query(expression):
            assert time.monotonic() < end_s, f"{expression} was never true"
            time.sleep(_POLL_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Fault with its repair and its alerts. of_all: alerts over all replicas, without an instance."""

    name: str
    cause: str
    cure: str
    of_one: tuple[str, ...]
    of_all: tuple[str, ...]
    happens: Callable[[Scene], AbstractContextManager[Cure]]

    @property
    def alerts(self) -> tuple[str, ...]:
        return (*self.of_one, *self.of_all)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Proof that an alert fired and resolved: times from the fault and from the repair to Alertmanager's notices."""

    alert: str
    fired_s: float
    resolved_s: float
    description: str


FAULTS: list[Fault] = []


def fault(
    *, cause: str, cure: str, of_one: tuple[str, ...] = (), of_all: tuple[str, ...] = ()
) -> Callable[[Callable[[Scene], Iterator[Cure]]], Fault]:
    """Register a generator that causes a fault, yields once, and repairs it."""

    def register(happens: Callable[[Scene], Iterator[Cure]]) -> Fault:
        made = Fault(
            name=happens.__name__,
            cause=cause,
            cure=cure,
            of_one=tuple(f"Antiphon{name}" for name in of_one),
            of_all=tuple(f"Antiphon{name}" for name in of_all),
            happens=functools.wraps(happens)(contextlib.contextmanager(happens)),
        )
        FAULTS.append(made)
        return made

    return register


def prove(fault: Fault, watch: Watch, folder: Path) -> list[Proof]:
    """Cause a fault, wait for all its alerts, repair it, and wait until all have resolved."""
    wanted = [(name, fault.name) for name in fault.of_one] + [(name, "") for name in fault.of_all]

    def heard(*, is_firing: bool, since: int) -> dict[str, tuple[float, str]]:
        began_s = time.monotonic()
        found = {}
        for name, instance in wanted:
            notice = watch.receiver.wait(name, instance, is_firing=is_firing, since=since, within_s=PATIENCE_S)
            found[name] = (max(0.0, notice.at_s - began_s), notice.description)
        return found

    since = watch.receiver.num_heard
    with fault.happens(Scene(watch=watch, folder=folder, name=fault.name)) as cure:
        fired = heard(is_firing=True, since=since)
        since = watch.receiver.num_heard
        cure()
        resolved = heard(is_firing=False, since=since)
    return [
        Proof(alert=name, fired_s=fired[name][0], resolved_s=resolved[name][0], description=fired[name][1])
        for name, _ in wanted
    ]
