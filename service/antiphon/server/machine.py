"""Limits of the machine or container (memory, cores, open files), and the use of them by processes.

If a limit is low but serving is possible, the server logs a warning and starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import weakref
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger(__name__)

RESERVED_FILES = 64
"""Descriptors reserved for other uses: graphs, libraries, listeners, logs (measured: about 25), scrapes, read files."""
# Highest limit that is set. A server with more connections lacks another resource before it lacks descriptors.
_MOST_FILES = 1_000_000
# Files with the memory limit of a control group: version 2, version 1.
_LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OPEN_FILES = Path("/proc/self/fd")


def memory_bytes(groups: Path = _CONTROL_GROUPS, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the memory that this process may use: the container's limit or the machine's memory, whichever is less.

    Returns None if neither can be read.
    """
    limits = [limit for name in _LIMIT_FILES if (limit := _number(_read(groups / name))) is not None]
    for line in _read(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal" and (kib := _number(value.removesuffix("kB"))) is not None:
            limits.append(kib * 1024)
    return min(limits, default=None)


def usable_cores() -> int:
    """Return the number of cores for this process, from its affinity and the container's CPU quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (_CONTROL_GROUPS / "cpu.max").read_text(encoding="ascii").split()
        return max(1, min(affinity, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no cgroup v2, or "max": no quota
        return affinity


def allow_files(num_connections: int, num_other_connections: int = 0) -> int | None:
    """Raise this process's limit of open files as far as allowed. Return the number of connections that fit.

    Warns if that is less than num_connections. Returns None if there is no limit. num_other_connections: to other
    ports; their files are reserved.
    """
    reserve = RESERVED_FILES + num_other_connections
    needed = num_connections + reserve
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    ceiling = max(needed, _MOST_FILES)
    allowed = max(soft, ceiling if hard == resource.RLIM_INFINITY else min(hard, ceiling))
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        log.warning(
            "%d files may be open at once; %d connections, one for each request that may run or wait or as many as "
            "max_connections, need %d: raise the limit (ulimit -n)",
            allowed,
            num_connections,
            needed,
        )
    return max(allowed - reserve, allowed // 4)


def num_open_files() -> int:
    """Return the number of open files of this process; 0 if the system does not report it."""
    with contextlib.suppress(OSError):
        # From Linux 6.2 on the directory's size is the number. Before that it is 0, and the entries are counted.
        return _OPEN_FILES.stat().st_size or sum(1 for _ in _OPEN_FILES.iterdir())
    return 0


class ResidentMemory:
    """Reads the resident memory of this process from a kernel file that stays open.

    Opening and reading a file releases the interpreter lock six times, and each time the event loop waits for the
    engine.
    """

    def __init__(self) -> None:
        try:
            self._statm: int | None = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:  # not Linux
            self._statm = None
        else:
            weakref.finalize(self, os.close, self._statm)

    def num_bytes(self) -> int:
        """Return the number of bytes; 0 if it is unknown."""
        if self._statm is None:
            return 0
        return int(os.pread(self._statm, 64, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")


def proportional_bytes(pids: Iterable[int]) -> int:
    """Return the sum of the proportional set sizes (proc(5)) of processes. One that has ended counts nothing."""
    return sum(_proportional_bytes(pid) for pid in pids)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None  # "max" is no limit


def _proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
