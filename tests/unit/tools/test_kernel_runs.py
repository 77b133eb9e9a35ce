"""Runs of single kernels: each table of kernels that this processor can run, and the refusals. No speed is compared."""

import ctypes
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.errors import KernelError
from antiphon.ops.workspace import native_library
from antiphon.tools.bench import kernel_runs
from antiphon.tools.bench.kernel_runs import (
    KERNELS,
    PORTABLE,
    AttentionShape,
    KernelRun,
    ProductShape,
    active_kernels,
    bare_run,
    packed_attention_run,
    paged_attention_run,
    product_run,
    read_run,
    sample_run,
)

pytestmark = pytest.mark.combinations

ROOT = Path(__file__).parents[3]
SHAPE = AttentionShape(rows=3, length=21, heads=2, width=24)
# Queries and keys of a position, and weights and values: two products for each pair of positions.
PACKED = 2 * 3 * 21 * 21 * 2 * 24
PAGED = 2 * 3 * 21 * 2 * 24


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    """Return the name of each table of kernels that this processor can run."""
    try:
        product_run(request.param, ProductShape(1, 1, 1)).__exit__(None, None, None)
    except KernelError:
        pytest.skip(f"this processor has no {request.param}")
    return str(request.param)


def check(run: KernelRun, work: int | None = None) -> None:
    with run:
        assert work in (None, run.work)
        assert run.work > 0
        for _ in range(2):
            seconds = run.seconds(1e-5)
            assert math.isfinite(seconds)
            assert seconds > 0


def test_product_has_a_time_for_every_number_of_rows(kernels: str) -> None:
    for rows in (1, 2, 7, 40):
        for bits in (8, 4):
            check(product_run(kernels, ProductShape(rows, 100, 83), bits=bits), rows * 100 * 83)


def test_end_of_step_has_a_time_for_every_number_of_rows(kernels: str) -> None:
    for rows in (1, 2, 7, 40):
        check(sample_run(kernels, ProductShape(rows, 100, 531)), rows * 100 * 531)


def test_attention_has_a_time_for_every_cache(kernels: str) -> None:
    check(packed_attention_run(kernels, SHAPE), PACKED)
    for is_half in (False, True):
        for appends in (False, True):
            check(paged_attention_run(kernels, SHAPE, is_half=is_half, appends=appends), PAGED)


def test_bare_loop_has_a_time_except_for_portable_kernels(kernels: str) -> None:
    for bits in (8, 4, 32):
        if kernels == PORTABLE:
            with pytest.raises(KernelError, match="cannot run bare with the kernels portable"):
                bare_run(kernels, bits=bits)
        else:
            check(bare_run(kernels, bits=bits))


def test_reading_has_a_time_and_rounds_its_bytes_up(kernels: str) -> None:
    check(read_run(kernels, 1), 256)
    check(read_run(kernels, 65536), 65536)


def test_bare_loop_is_not_removed_by_the_compiler(kernels: str) -> None:
    """A call makes 1,000 rounds of at least twelve instructions: more than two cycles each on any processor."""
    if kernels == PORTABLE:
        pytest.skip("portable kernels have no bare loop")
    for bits in (8, 4, 32):
        with bare_run(kernels, bits=bits) as run:
            assert run.seconds(1e-3) > 4e-7


@pytest.mark.parametrize("name", ["mmx", "", "AVX2"])
def test_unknown_kernels_are_refused(name: str) -> None:
    message = "must be one of amx, avx512, avxvnni, avx2, i8mm, dotprod, portable"
    with pytest.raises(KernelError, match=message):
        product_run(name, ProductShape(1, 16, 16))
    with pytest.raises(KernelError, match=message):
        bare_run(name)


def test_native_library_refuses_unknown_kernels_itself() -> None:
    table = native_library().antiphon_kernel_table
    table.argtypes, table.restype = (ctypes.c_char_p,), ctypes.c_void_p
    assert table(b"mmx") is None
    assert table(b"portable") is not None


def test_runs_without_compiler_or_checkout_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_runs, "_LIBRARY", tmp_path / "kernel_runs.so")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelError, match="cannot be compiled: no C\\+\\+ compiler: no-such-compiler is not there"):
        kernel_runs._runs.__wrapped__()
    monkeypatch.setattr(kernel_runs, "_ROOT", tmp_path)
    with pytest.raises(KernelError, match="compiled from a checkout"):
        kernel_runs._runs.__wrapped__()


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sizes are \(1, 0, 16\)"):
        ProductShape(1, 0, 16)
    with pytest.raises(ValueError, match="all must be at least 1"):
        AttentionShape(1, 16, 0, 32)


@pytest.mark.parametrize(("wanted", "found"), [("portable", "portable"), ("mmx", "KernelError")])
def test_active_kernels_are_those_of_the_variable(wanted: str, found: str) -> None:
    program = """
from antiphon.tools.bench.kernel_runs import KernelError, active_kernels
try:
    print(active_kernels())
except KernelError as error:
    print(type(error).__name__, error)
"""
    environment = {**os.environ, "ANTIPHON_CPU": wanted}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[0] == found
    assert active_kernels() in KERNELS
