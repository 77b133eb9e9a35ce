"""Report of the compiler about a compiled kernel: registers, spills, shared memory, instructions.

Needs Triton's tools.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from antiphon.errors import BudgetError

SHARED_LIMITS = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Shared memory that one program can use, in bytes, by architecture (CUDA programming guide, table of capabilities)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceUsage:
    """Resources of one thread (registers; stack and local memory in bytes), and of one program (shared, in bytes).

    Local memory is where registers are spilled to.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int


def usage_of(code: bytes, dynamic_shared_bytes: int) -> ResourceUsage:
    """Return the resources of a cubin. Raises CalledProcessError if it is none."""
    report = _cuobjdump("--dump-resource-usage", code)
    fields = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", report)}
    return ResourceUsage(
        registers=fields["REG"],
        stack_bytes=fields["STACK"],
        local_bytes=fields["LOCAL"],
        shared_bytes=fields["SHARED"] + dynamic_shared_bytes,
    )


def instructions_of(code: bytes) -> list[str]:
    """Return the names of a cubin's instructions in their order, with their modifiers: `LDG.E.128.CONSTANT`."""
    listing = _cuobjdump("--dump-sass", code)
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", listing, re.MULTILINE)


def check_budget(name: str, usage: ResourceUsage, architecture: int) -> None:
    """Raise BudgetError if a kernel spills registers, or needs more shared memory than the architecture has."""
    if usage.local_bytes or usage.stack_bytes:
        raise BudgetError(
            f"{name} for sm_{architecture} uses {usage.local_bytes} bytes of local memory and {usage.stack_bytes} of"
            " stack; both must be 0"
        )
    if usage.shared_bytes > SHARED_LIMITS[architecture]:
        raise BudgetError(
            f"{name} for sm_{architecture} uses {usage.shared_bytes} bytes of shared memory; the limit is"
            f" {SHARED_LIMITS[architecture]}"
        )


def _cuobjdump(option: str, code: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(_program("cuobjdump")), option, file.name]
        # cuobjdump looks for nvdisasm on the path.
        environment = {"PATH": str(_program("nvdisasm").parent)}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


@cache
def _program(name: str) -> Path:
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
