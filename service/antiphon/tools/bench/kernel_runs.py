"""Kernels of the native library on their own, timed in the calling thread. Torch-free.

Owns the Python side of `native/kernel_runs.cc`, which describes what a run includes, and has it compiled when the first
run is made: its library is no part of the product. Does not know which shapes are of interest. A run belongs to one
thread at a time.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from antiphon.errors import KernelError
from antiphon.ops.workspace import native_library

PORTABLE = "portable"
KERNELS = ("amx", "avx512", "avxvnni", "avx2", "i8mm", "dotprod", PORTABLE)
"""Names of all kernels, the fastest of a processor first."""

_ROOT = Path(__file__).parents[4]
_LIBRARY = _ROOT / "build" / "kernel_runs.so"
_RUN = ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class ProductShape:
    """Rows, inputs and outputs of a product. All are at least 1."""

    rows: int
    inputs: int
    outputs: int

    def __post_init__(self) -> None:
        _check_sizes(self.rows, self.inputs, self.outputs)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Rows, positions of each row, heads, and width of a head. All are at least 1."""

    rows: int
    length: int
    heads: int
    width: int

    def __post_init__(self) -> None:
        _check_sizes(self.rows, self.length, self.heads, self.width)


class _NativeProduct(ctypes.Structure):
    """Mirrors antiphon::ProductShape in kernel_runs.cc, field by field."""

    _fields_ = [(name, ctypes.c_int64) for name in ProductShape.__slots__]


class _NativeAttention(ctypes.Structure):
    """Mirrors antiphon::AttentionShape in kernel_runs.cc, field by field."""

    _fields_ = [(name, ctypes.c_int64) for name in AttentionShape.__slots__]


# Arguments of the functions that make a run, after the table of the kernels.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "product": (ctypes.POINTER(_NativeProduct), ctypes.c_int),
    "sample": (ctypes.POINTER(_NativeProduct),),
    "packed": (ctypes.POINTER(_NativeAttention),),
    "paged": (ctypes.POINTER(_NativeAttention), ctypes.c_int, ctypes.c_int),
    "bare": (ctypes.c_int,),
    "read": (ctypes.c_int64,),
}


class KernelRun:
    """A call of a kernel with its inputs, repeated as often as wanted. Closed as a context manager.

    work: number of multiply-adds of one call, or of bytes that a `read_run` reads.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self.work: float = _function("work", _RUN, returns=ctypes.c_double)(handle)
        self._seconds = _function("seconds", _RUN, ctypes.c_int64, returns=ctypes.c_double)
        self._calls: int | None = None

    def __enter__(self) -> KernelRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _function("close", _RUN)(self._handle)

    def seconds(self, least_s: float) -> float:
        """Repeat the call for about least_s, or once if it takes longer; return the mean seconds of a call.

        The first measurement warms up and determines the number of calls for all others.
        """
        if self._calls is None:
            self._seconds(self._handle, 1)
            once_s = max(self._seconds(self._handle, 1), 1e-9)
            self._calls = max(1, math.ceil(least_s / once_s))
        total: float = self._seconds(self._handle, self._calls)
        return total / self._calls


def active_kernels() -> str:
    """Return the name of the kernels that this process runs: the fastest, or those that ANTIPHON_CPU names.

    Raises KernelError if ANTIPHON_CPU names kernels that this process cannot run.
    """
    function = _native().antiphon_kernels
    function.restype = ctypes.c_char_p
    name: str = function().decode()
    if not name:
        raise KernelError(f"ANTIPHON_CPU must be one of {', '.join(KERNELS)} that this processor can run")
    return name


def product_run(kernels: str, shape: ProductShape, *, bits: Literal[4, 8] = 8) -> KernelRun:
    """Return the product of a weight of 8 or 4 bits with rows of float32, which it quantises. Raises KernelError."""
    return _run("product", kernels, _NativeProduct(*astuple(shape)), bits)


def sample_run(kernels: str, shape: ProductShape) -> KernelRun:
    """Return the end of a step: int8 logits of `outputs` tokens, and the likeliest token of each row.

    Raises KernelError.
    """
    return _run("sample", kernels, _NativeProduct(*astuple(shape)))


def packed_attention_run(kernels: str, shape: AttentionShape) -> KernelRun:
    """Return the attention of every position over its own sequence. Raises KernelError."""
    return _run("packed", kernels, _NativeAttention(*astuple(shape)))


def paged_attention_run(kernels: str, shape: AttentionShape, *, is_half: bool, appends: bool) -> KernelRun:
    """Return the attention of one position of each row over its cache. Raises KernelError.

    is_half: the cache is float16, else float32. appends: the position's own key and value are written first, as in self
    attention.
    """
    return _run("paged", kernels, _NativeAttention(*astuple(shape)), is_half, appends)


def bare_run(kernels: str, *, bits: Literal[4, 8, 32] = 8) -> KernelRun:
    """Return a loop of the kernels' own multiply-add on registers alone.

    bits: of the weights of a product of integers; 32: sums of float32. Raises KernelError, also for portable kernels,
    which have no instruction of their own.
    """
    return _run("bare", kernels, bits)


def read_run(kernels: str, num_bytes: int) -> KernelRun:
    """Return a loop that reads bytes in order, their number rounded up to 256. Raises KernelError."""
    _check_sizes(num_bytes)
    return _run("read", kernels, num_bytes)


def _run(kind: str, kernels: str, *arguments: Any) -> KernelRun:
    if kernels not in KERNELS:
        raise KernelError(f"kernels are {kernels}; they must be one of {', '.join(KERNELS)}")
    table_named = _native().antiphon_kernel_table
    table_named.argtypes, table_named.restype = (ctypes.c_char_p,), ctypes.c_void_p
    table = table_named(kernels.encode())
    make = _function(kind, ctypes.c_void_p, *_ARGUMENTS[kind], returns=_RUN)
    handle = None if table is None else make(table, *arguments)
    if handle is None:
        raise KernelError(f"this processor cannot run {kind} with the kernels {kernels}")
    return KernelRun(handle)


def _function(name: str, *arguments: Any, returns: Any = None) -> Callable[..., Any]:
    function = getattr(_runs(), f"antiphon_run_{name}")
    function.argtypes = arguments
    function.restype = returns
    return function  # type: ignore[no-any-return]


@cache
def _native() -> ctypes.CDLL:
    return native_library()


@cache
def _runs() -> ctypes.CDLL:
    """Load the library of the runs, compiled from the checkout. Raises KernelError if it cannot be compiled."""
    build = _ROOT / "hatch_build.py"
    if not build.exists():
        raise KernelError("runs of single kernels are compiled from a checkout, which this installation is not")
    command = [sys.executable, str(build), "kernel-bench", str(_LIBRARY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(
            f"runs of single kernels cannot be compiled: {done.stderr.strip().removeprefix('antiphon: ')}"
        )
    return ctypes.CDLL(str(_LIBRARY))


def _check_sizes(*sizes: int) -> None:
    if min(sizes) < 1:
        raise ValueError(f"sizes are {sizes}; all must be at least 1")
