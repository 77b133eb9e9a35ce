"""Resources of a process: memory, threads and descriptors, as the kernel counts them."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.integration.process import ServerProcess, is_idle

PATIENCE_S = 30
LOOK_S = 0.05
STEADY_LOOKS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    resident_bytes: int
    threads: int
    descriptors: int


def footprint(pid: int) -> Footprint:
    """Return the resources of a running process and its children, pages that they share counted by each.

    Raises FileNotFoundError if there is none.
    """
    children = (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text().split()
    each = [_of_one(process) for process in (str(pid), *children)]
    return Footprint(
        resident_bytes=sum(held.resident_bytes for held in each),
        threads=sum(held.threads for held in each),
        descriptors=sum(held.descriptors for held in each),
    )


def _of_one(pid: str) -> Footprint:
    process = Path("/proc") / pid
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return Footprint(
        resident_bytes=int(fields["VmRSS"].split()[0]) * 1024,
        threads=int(fields["Threads"]),
        descriptors=len(list((process / "fd").iterdir())),
    )


def reset_peak(pid: int) -> None:
    """Let `peak_bytes` count from now on (Linux: Documentation/filesystems/proc.rst, clear_refs)."""
    (Path("/proc") / str(pid) / "clear_refs").write_text("5", encoding="ascii")


def peak_bytes(pid: int) -> int:
    """Return the peak of resident bytes since the process began or `reset_peak` was called."""
    status = (Path("/proc") / str(pid) / "status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process, kernel time included."""
    _, _, fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")
    user, system = fields.split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def settled(pid: int, condition: Callable[[Footprint], bool], *, patience_s: float = PATIENCE_S) -> Footprint:
    """Poll until a condition holds or the time limit passes, because a server sees the end of a connection later."""
    end_s = time.monotonic() + patience_s
    found = footprint(pid)
    while not condition(found) and time.monotonic() < end_s:
        time.sleep(LOOK_S)  # another process reports no event, so its resources are polled
        found = footprint(pid)
    return found


def steady() -> Callable[[Footprint], bool]:
    """Return a condition that holds when threads and descriptors were the same in several samples."""
    recent: deque[tuple[int, int]] = deque(maxlen=STEADY_LOOKS)

    def is_steady(found: Footprint) -> bool:
        recent.append((found.threads, found.descriptors))
        return len(recent) == STEADY_LOOKS and len(set(recent)) == 1

    return is_steady


async def check_nothing_is_left(
    server: ServerProcess, before: Footprint, names: tuple[str, ...] = ("descriptors",)
) -> Footprint:
    """Wait until a server is idle, and its resources are as before."""
    await asyncio.to_thread(server.wait_for_metrics, is_idle)
    return await check_as_before(server, before, names)


async def check_as_before(
    server: ServerProcess, before: Footprint, names: tuple[str, ...] = ("descriptors",)
) -> Footprint:
    """Wait in another thread until the resources are as before; the event loop closes connections of this side."""

    def is_as_before(held: Footprint) -> bool:
        return all(getattr(held, name) <= getattr(before, name) for name in names)

    after = await asyncio.to_thread(settled, server.process.pid, is_as_before)
    assert is_as_before(after), f"{after} after {before}"
    return after
