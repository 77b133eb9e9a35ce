"""Programs for 64-bit Arm on this machine: `make arm-tools` writes the folder that they are in.

QEMU's processors: `max` has every instruction that it knows, `neoverse-n1` dot products and no products of matrices of
int8, `cortex-a72` neither.
"""

from __future__ import annotations

import atexit
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
LIBRARY = TOOLS / "antiphon" / "ops" / "_native.so"
PROCESSORS = {"portable": "cortex-a72", "dotprod": "neoverse-n1", "i8mm": "max"}
"""The emulated processor that chooses each table of kernels."""


def settings(kernels: str) -> dict[str, str]:
    """Return the settings of the environment for a program on a processor that chooses these kernels."""
    paths = (TOOLS, *(ROOT / name for name in ("protos", "service", "model", ".")))
    return {"PYTHONPATH": os.pathsep.join(map(str, paths)), "QEMU_CPU": PROCESSORS[kernels], "ANTIPHON_CPU": ""}


class EmulatedNodes:
    """A process that runs graphs of single operators, and the kernels that it chose. Not for several threads."""

    def __init__(self, kernels: str) -> None:
        self._process = subprocess.Popen(
            [PYTHON, "-m", "tests.arm.run_nodes", LIBRARY],
            env=os.environ | settings(kernels), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.kernels: str = self._answer()

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

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        try:
            return pickle.load(self._process.stdout)
        except EOFError:
            raise RuntimeError(f"the emulated process ended with status {self._process.wait()}") from None


@cache
def emulated_nodes(kernels: str) -> EmulatedNodes:
    """Return the process of these kernels, which ends with this one."""
    nodes = EmulatedNodes(kernels)
    atexit.register(nodes.close)
    return nodes
