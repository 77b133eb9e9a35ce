"""Programs for 64-bit Arm on this machine: `make arm-tools` writes the folder that they are in.

QEMU's processors: `max` has every instruction that it knows, `neoverse-n1` dot products and no products of matrices of
int8, `cortex-a72` neither.
"""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(os.environ.get("ANTIPHON_ARM_TOOLS", ROOT / "build" / "arm"))
COMPILER = TOOLS / "bin" / "aarch64-g++"
PYTHON = TOOLS / "bin" / "python"
LIBRARY = TOOLS / "_native.so"
PROCESSORS = {"portable": "cortex-a72", "dotprod": "neoverse-n1", "i8mm": "max"}
"""The emulated processor that chooses each table of kernels."""


def environment(kernels: str) -> dict[str, str]:
    """Return the environment of a program on a processor that chooses these kernels."""
    paths = (TOOLS / "site", *(ROOT / name for name in ("protos", "service", "model", ".")))
    own = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "QEMU_CPU": PROCESSORS[kernels]}
    return {name: value for name, value in os.environ.items() if name != "ANTIPHON_CPU"} | own


class EmulatedNodes:
    """A process that runs graphs of single operators. Not for several threads."""

    def __init__(self, kernels: str) -> None:
        self._process = subprocess.Popen(
            [PYTHON, "-m", "tests.arm.run_nodes", LIBRARY],
            env=environment(kernels), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        found = self._answer()
        if found != kernels:
            raise RuntimeError(f"the emulated processor chose the kernels {found!r} and not {kernels!r}")

    def run(self, model: bytes, threads: int, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Run a graph and return its outputs; inputs that it changed are changed in place."""
        assert self._process.stdin is not None
        pickle.dump((model, threads, dict(inputs)), self._process.stdin)
        self._process.stdin.flush()
        answer = self._answer()
        if isinstance(answer, Exception):
            raise answer
        outputs, changed = answer
        for name, array in changed.items():
            inputs[name][...] = array
        return list(outputs)

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        try:
            return pickle.load(self._process.stdout)
        except EOFError:
            raise RuntimeError(f"the emulated process ended with status {self._process.wait()}") from None


@cache
def emulated_nodes(kernels: str) -> EmulatedNodes:
    """Return the process of these kernels, which ends with this one."""
    return EmulatedNodes(kernels)


__all__ = ["COMPILER", "LIBRARY", "PROCESSORS", "PYTHON", "TOOLS", "EmulatedNodes", "emulated_nodes", "environment"]
