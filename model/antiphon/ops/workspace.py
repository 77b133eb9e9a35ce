"""Exact accounting of ONNX Runtime's working memory, by this project's own allocators. Torch-free.

Owns the Python side of `native/`: it attaches sessions, reads the counters and sets the limit. Does not know what the
sessions compute. ONNX Runtime has one allocator in a process. The thread that loads or runs a session chooses which of
our allocators it uses, so that the memory of each model is counted and limited separately.
"""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.errors import WorkspaceError

LIBRARY = Path(__file__).with_name("_native.so")
# Version of the native library, the same as antiphon_native_version in native/register.cc: raise both together.
NATIVE_VERSION = 9

_HANDLE = ctypes.c_void_p  # of an allocator; None is the process's own
_BUILD_IT = "install antiphon again (or `make stubs` in a checkout) to build it"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkspaceStats:
    """Counters of the allocator, all in bytes except the last two.

    in_use_bytes and peak_bytes count requested bytes, without rounding; peak_bytes since the last `reset_peak`.
    reserved_bytes were obtained from the operating system; cached_bytes is the unused part. limit_bytes 0: no limit.
    """

    in_use_bytes: int
    peak_bytes: int
    reserved_bytes: int
    cached_bytes: int
    limit_bytes: int
    allocations: int
    refusals: int


class _NativeStats(ctypes.Structure):
    """Mirrors antiphon::WorkspaceStats in counting_allocator.h, field by field."""

    _fields_ = [(name, ctypes.c_uint64) for name in WorkspaceStats.__slots__]


class Workspace:
    """Counting allocator: the process's own, or a separate one (`is_own`). Thread-safe.

    The peak between `reset_peak` and `stats` covers every thread that used the allocator between the two calls. When
    the last reference to a separate allocator is deleted, its unused memory returns to the operating system; blocks in
    use return when they are freed.
    Raises WorkspaceError when the library cannot be loaded.
    """

    def __init__(self, library: Path = LIBRARY, *, is_own: bool = False) -> None:
        self.library = library
        self._highest_bytes = 0
        self._native = native_library(library)
        try:
            self._stats = _function(self._native, "stats", _HANDLE, ctypes.POINTER(_NativeStats))
            self._set_limit = _function(self._native, "set_limit", _HANDLE, ctypes.c_uint64)
            self._reset_peak = _function(self._native, "reset_peak", _HANDLE)
            self._trim = _function(self._native, "trim", _HANDLE)
            # Keeps the interpreter lock: it takes nanoseconds, and another thread would hold the lock for much longer.
            self._use = _function(ctypes.PyDLL(str(library)), "use", _HANDLE, returns=_HANDLE)
            self._handle = _function(self._native, "create", returns=_HANDLE)() if is_own else None
            if is_own:
                weakref.finalize(self, _function(self._native, "close", _HANDLE), self._handle)
        except AttributeError as error:
            raise _unusable(library, error) from None

    def enter(self) -> int | None:
        """Make this thread's sessions allocate here; returns the previous allocator, for `leave`.

        A pair of calls instead of a context manager, for speed: the engine thread makes both for every forward pass.
        """
        previous: int | None = self._use(self._handle)
        return previous

    def leave(self, previous: int | None) -> None:
        """Make this thread's sessions use the previous allocator again, as returned by `enter`."""
        self._use(previous)

    @property
    def highest_bytes(self) -> int:
        """Return the largest peak_bytes since the start, across all resets."""
        return max(self._highest_bytes, self.stats().peak_bytes)

    def reset_peak(self) -> WorkspaceStats:
        """Restart peak_bytes from in_use_bytes; returns the counters before the reset."""
        before = self.stats()
        self._highest_bytes = max(self._highest_bytes, before.peak_bytes)
        self._reset_peak(self._handle)
        return before

    def trim(self) -> None:
        """Return unused memory to the operating system."""
        self._trim(self._handle)

    def attach(self, options: Any) -> None:
        """Make the sessions built from these onnxruntime.SessionOptions use our allocators, also for weights.

        Raises WorkspaceError when the library was not built for this ONNX Runtime, or when the processor lacks the
        instruction set that ANTIPHON_CPU names.
        """
        try:
            options.register_custom_ops_library(str(self.library))
        except Exception as error:  # onnxruntime's exceptions share no narrower base
            reason = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error))
            raise WorkspaceError(f"{self.library} cannot be used: {reason}") from None
        options.add_session_config_entry("session.use_env_allocators", "1")

    def stats(self) -> WorkspaceStats:
        """Return the counters, all read at one moment."""
        native = _NativeStats()
        self._stats(self._handle, ctypes.byref(native))
        return WorkspaceStats(**{name: getattr(native, name) for name in WorkspaceStats.__slots__})

    def limit_growth(self, budget_bytes: int | None) -> None:
        """Limit reserved_bytes to the memory in use now and budget_bytes more; None removes the limit.

        A run that needs more raises an error of ONNX Runtime and frees its memory; its session stays usable.
        """
        if budget_bytes is None:
            self._set_limit(self._handle, 0)
            return
        self.trim()
        self._set_limit(self._handle, self.stats().reserved_bytes + budget_bytes)


def native_library(library: Path = LIBRARY) -> ctypes.CDLL:
    """Load the native library. Raises WorkspaceError if it is missing or belongs to another version of this package."""
    try:
        native = ctypes.CDLL(str(library))
        _check_version(native)
    except OSError as error:
        raise _unusable(library, error) from None
    return native


def _unusable(library: Path, error: Exception) -> WorkspaceError:
    return WorkspaceError(f"{library} cannot be used: {error}; {_BUILD_IT}")


def _check_version(native: ctypes.CDLL) -> None:
    """Raise OSError for a library of another version of this package."""
    version = getattr(native, "antiphon_native_version", None)
    number = "none" if version is None else version()
    if number != NATIVE_VERSION:
        raise OSError(f"its version is {number}, this antiphon needs {NATIVE_VERSION}")


def _function(native: ctypes.CDLL, name: str, *arguments: Any, returns: Any = None) -> Callable[..., Any]:
    function = getattr(native, f"antiphon_workspace_{name}")
    function.argtypes = arguments
    function.restype = returns
    return function  # type: ignore[no-any-return]
