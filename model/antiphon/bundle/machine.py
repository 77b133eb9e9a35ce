"""Facts about this machine that reports name: the processor and the free memory. Torch-free."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """Return the processor's model name as the system reports it, or its architecture where it reports none."""
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def available_bytes() -> int:
    """Return the free memory in bytes. Raises OSError where the system does not report it."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable, the amount of free memory")
