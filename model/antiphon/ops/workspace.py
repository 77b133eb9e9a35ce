"""Exact accounting of ONNX Runtime's working memory by this project's own allocators, and threads. Torch-free.

Owns the Python side of `native/`: it attaches sessions, reads the counters and sets the limit. Does not know what the
sessions compute. ONNX Runtime has one allocator in a process. The thread that loads or runs a session chooses which of
our allocators it uses, so that the memory of each model is counted and limited separately. The threads of a model's
runs belong to its workspace too.
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
NATIVE_VERSION = 10

_HANDLE = ctypes.c_void_p  # of a workspace; None is the process's own
_BUILD_IT = "install antiphon again (or `make stubs` in a checkout) to build it"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkspaceStats:
    """Counters of the allocator, all in bytes except the last two.

    in_use_bytes counts requested bytes, without rounding, and so do its largest values: peak_bytes since the last
    `reset_peak`, highest_bytes since the start.
    reserved_bytes were obtained from the operating system; cached_bytes is the unused part. limit_bytes 0: no limit.
    """

    in_use_bytes: int
    peak_bytes: int
    highest_bytes: int
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

    threads: number of cores that one run of this workspace's sessions may use. A separate workspace has threads of its
    own, which all its sessions share; the process's own leaves that to each session.
    The peak between `reset_peak` and `peak` covers every thread that used the allocator between the two calls. When
    the last reference to a separate allocator is deleted, its unused memory returns to the operating system; blocks in
    use return when they are freed.
    Raises WorkspaceError when the library cannot be loaded, or a thread cannot be started.
    """

    def __init__(self, library: Path = LIBRARY, *, is_own: bool = False, threads: int = 1) -> None:
        self.library = library
        self.session_threads = 1 if is_own else threads
        self._native = native_library(library)
        try:
            self._stats = _function(self._native, "stats", _HANDLE, ctypes.POINTER(_NativeStats))
            self._set_limit = _function(self._native, "set_limit", _HANDLE, ctypes.c_uint64)
            self._trim = _function(self._native, "trim", _HANDLE)
            # Keep the interpreter lock: they take nanoseconds, and another thread would hold the lock for much longer.
            quick = ctypes.PyDLL(str(library))
            self._use = _function(quick, "use", _HANDLE, returns=_HANDLE)
            self._reset_peak = _function(quick, "reset_peak", _HANDLE, returns=ctypes.c_uint64)
            self._peak = _function(quick, "peak", _HANDLE, returns=ctypes.c_uint64)
            create = _function(self._native, "create", ctypes.c_size_t, returns=_HANDLE)
            self._handle = create(threads) if is_own else None
            if is_own and self._handle is None:
                raise WorkspaceError(f"{threads} threads of a model could not be started")
            if is_own:
                weakref.finalize(self, _function(self._native, "close", _HANDLE), self._handle)
        except AttributeError as error:
            raise _unusable(library, error) from None

    def enter(self) -> int | None:
        """Make this thread's sessions use this workspace; returns the previous one, for `leave`.

        A pair of calls instead of a context manager, for speed: the engine thread makes both for every forward pass.
        """
        previous: int | None = self._use(self._handle)
        return previous

    def leave(self, previous: int | None) -> None:
        """Make this thread's sessions use the previous workspace again, as returned by `enter`."""
        self._use(previous)

    def reset_peak(self) -> int:
        """Restart the peak from the bytes in use, which are returned."""
        return int(self._reset_peak(self._handle))

    def peak(self) -> int:
        """Return peak_bytes."""
        return int(self._peak(self._handle))

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
