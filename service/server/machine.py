"""What the machine, or the container, leaves a server: memory and open files. Looks once, at start-up.

A limit that is too low is no reason not to start as long as serving is possible: it is said in the log.
"""

from __future__ import annotations

import logging
import os
import resource
import weakref
from collections.abc import Mapping
from pathlib import Path

from antiphon.service.domain.errors import OverBudget
from antiphon.service.server.memory import ModelMemory

log = logging.getLogger(__name__)

OWN_FILES = 64
"""Files that connections must leave: graphs, libraries, listeners, logs (measured: about 25), scrapes, files read."""
# The limit is raised no further: with so many connections something else runs out.
_MOST_FILES = 1_000_000
# Where a control group says what it may use: version 2, version 1.
_LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")


def memory_bytes(groups: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes that this process may come to use: the container's limit, the machine's memory where that is less.

    None where neither can be read.
    """
    found = [limit for name in _LIMIT_FILES if (limit := _number(_read(groups / name))) is not None]
    for line in _read(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal" and (kib := _number(value.removesuffix("kB"))) is not None:
            found.append(kib * 1024)
    return min(found, default=None)


def check_memory(held: Mapping[str, ModelMemory], available_bytes: int | None) -> None:
    """Warn where all that the models may come to use is more than there is.

    Raises OverBudget where their weights and workspaces alone are: a cache may stay mostly empty, those do not.
    """
    if available_bytes is None:
        return
    total_bytes = sum(memory.total_bytes for memory in held.values())
    fixed_bytes = total_bytes - sum(memory.cache_bytes for memory in held.values())
    names = ", ".join(held)
    if fixed_bytes > available_bytes:
        raise OverBudget(
            f"{names}: weights and workspaces need {fixed_bytes} bytes; this machine or container has {available_bytes}"
        )
    if total_bytes > available_bytes:
        log.warning(
            "%s: may come to use %d bytes, of which %d are cache; this machine or container has %d; "
            "lower kv_cache_blocks or max_num_seqs",
            names,
            total_bytes,
            total_bytes - fixed_bytes,
            available_bytes,
        )


def allow_files(num_connections: int, num_others: int = 0) -> int | None:
    """Raise this process's limit of open files as far as it may; the connections that it has room for.

    Warns where those are fewer than num_connections. num_others: connections to further ports, which are kept free.
    Returns None where there is no limit.
    """
    reserve = OWN_FILES + num_others
    wanted = num_connections + reserve
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    ceiling = max(wanted, _MOST_FILES)
    allowed = max(soft, ceiling if hard == resource.RLIM_INFINITY else min(hard, ceiling))
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "%d files may be open at once; %d connections, one for each request that may run or wait or as many as "
            "max_connections, need %d: raise the limit (ulimit -n)",
            allowed,
            num_connections,
            wanted,
        )
    return max(allowed - reserve, allowed // 4)


class ResidentMemory:
    """Reads the resident memory of this process from a file of the kernel that stays open.

    To open and read a file lets go of the interpreter six times, and behind each the event loop waits for the engine.
    """

    def __init__(self) -> None:
        try:
            self._statm: int | None = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:  # not Linux
            self._statm = None
        else:
            weakref.finalize(self, os.close, self._statm)

    def num_bytes(self) -> int:
        """Return bytes; 0 where the number is not known."""
        if self._statm is None:
            return 0
        return int(os.pread(self._statm, 64, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None  # "max" is no limit
