"""Limits of the machine or container for a server: memory and open files. Read once, at start-up.

If a limit is low but serving is possible, the server logs a warning and starts.
"""

from __future__ import annotations

import logging
import os
import resource
import weakref
from collections.abc import Mapping
from pathlib import Path

from antiphon.domain.errors import OverBudget
from antiphon.server.models.memory import ModelMemory

log = logging.getLogger(__name__)

OWN_FILES = 64
"""Descriptors reserved for other uses: graphs, libraries, listeners, logs (measured: about 25), scrapes, read files."""
# Highest limit that is set. A server with more connections lacks another resource before it lacks descriptors.
_MOST_FILES = 1_000_000
# Files with the memory limit of a control group: version 2, version 1.
_LIMIT_FILES = ("memory.max", "memory/memory.limit_in_bytes")


def memory_bytes(groups: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the memory that this process may use: the container's limit or the machine's memory, whichever is less.

    Returns None if neither can be read.
    """
    found = [limit for name in _LIMIT_FILES if (limit := _number(_read(groups / name))) is not None]
    for line in _read(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal" and (kib := _number(value.removesuffix("kB"))) is not None:
            found.append(kib * 1024)
    return min(found, default=None)


def check_memory(models: Mapping[str, ModelMemory], available_bytes: int | None) -> None:
    """Warn if the models may use more memory than there is.

    Raises OverBudget if their weights and workspaces alone need more: a cache may stay mostly empty, but these do not.
    """
    if available_bytes is None:
        return
    total_bytes = sum(memory.total_bytes for memory in models.values())
    fixed_bytes = total_bytes - sum(memory.cache_bytes for memory in models.values())
    names = ", ".join(models)
    if fixed_bytes > available_bytes:
        raise OverBudget(
            f"{names}: weights and workspaces need {fixed_bytes} bytes; this machine or container has {available_bytes}"
        )
    if total_bytes > available_bytes:
        log.warning(
            "%s: may use %d bytes, of which %d are cache; this machine or container has %d; "
            "lower kv_cache_blocks or max_num_seqs",
            names,
            total_bytes,
            total_bytes - fixed_bytes,
            available_bytes,
        )


def allow_files(num_connections: int, num_others: int = 0) -> int | None:
    """Raise this process's limit of open files as far as allowed. Return the number of connections that fit.

    Warns if that is less than num_connections. num_others: connections to other ports, whose files are reserved.
    Returns None if there is no limit.
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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdigit() else None  # "max" is no limit
