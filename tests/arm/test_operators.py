"""Operators of 64-bit Arm, by the tests of the native operators: PyTorch and NumPy here, the library emulated."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from tests.arm.emulator import LIBRARY, PROCESSORS, ROOT, EmulatedNodes

pytestmark = pytest.mark.arm

# Every table has its own kernels for int8 and int4 products; the rest is the same code.
FILES = [(kernels, "tiles") for kernels in PROCESSORS]
FILES += [("i8mm", name) for name in ("ops", "sample", "refusals")]


@pytest.mark.parametrize(("kernels", "name"), FILES)
def test_operators_pass_the_tests_of_this_processor(kernels: str, name: str) -> None:
    """Run them again with every node in an emulated process."""
    file = ROOT / "tests" / "parity" / f"test_native_{name}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "not combinations", str(file)]
    environment = os.environ | {"ANTIPHON_ARM_KERNELS": kernels}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("kernels", PROCESSORS)
def test_each_processor_chooses_its_kernels(kernels: str) -> None:
    """Each runs a library that is not for this processor."""
    assert LIBRARY.read_bytes()[18] == 0xB7  # EM_AARCH64 of <elf.h>
    with contextlib.closing(EmulatedNodes(kernels)) as nodes:
        assert nodes.kernels == kernels
