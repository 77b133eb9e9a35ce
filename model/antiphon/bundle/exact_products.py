"""Session option that makes int8 products exact on every processor; every session with int8 graphs sets it."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any


def keep_products_exact(options: Any) -> None:
    """Change onnxruntime.SessionOptions so that products of uint8 and int8 never saturate.

    Processors without VNNI sum pairs of these products in 16 bits, which can saturate. The option converts the weights
    to uint8. It is set only on these processors, because with VNNI it would double the time.
    """
    if _lacks_vnni():
        options.add_session_config_entry("session.x64quantprecision", "1")


@cache
def _lacks_vnni() -> bool:
    """Return True on an x86 processor that is not known to have instructions for exact u8 x s8 products."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return not (cpuinfo.is_file() and has_vnni(cpuinfo.read_text(encoding="utf-8")))


def has_vnni(cpuinfo: str) -> bool:
    """Return whether the flags in the text of /proc/cpuinfo name AVX-512 VNNI, AVX-VNNI or AMX for 8-bit integers."""
    flags = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    return not {"avx512_vnni", "avx_vnni", "amx_int8"}.isdisjoint(flags.split())
