"""Products of 8-bit integers that ONNX Runtime computes exactly on every processor: for whoever opens int8 graphs."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any


def keep_products_exact(options: Any) -> None:
    """Set onnxruntime.SessionOptions so that products of uint8 and int8 do not saturate, where the processor would.

    Without VNNI pairs of them are summed in 16 bits. With the setting the weights become uint8, which would take twice
    the time where VNNI is.
    """
    if _lacks_vnni():
        options.add_session_config_entry("session.x64quantprecision", "1")


@cache
def _lacks_vnni() -> bool:
    """Whether this is an x86 processor without instructions for exact u8 x s8 products, as far as one can tell."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return not (cpuinfo.is_file() and has_vnni(cpuinfo.read_text(encoding="utf-8")))


def has_vnni(cpuinfo: str) -> bool:
    """Whether the flags in /proc/cpuinfo's text name AVX-512 VNNI, AVX-VNNI or AMX for 8-bit integers."""
    flags = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    return not {"avx512_vnni", "avx_vnni", "amx_int8"}.isdisjoint(flags.split())
