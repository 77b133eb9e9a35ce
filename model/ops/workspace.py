"""Exact accounting of the memory ONNX Runtime works in, by allocators of our own that its sessions use.

Owns the Python side of `native/`: attaching sessions, reading the counters, the limit. Refuses to know what the
sessions compute; torch-free. ONNX Runtime knows one allocator a process; which of ours stands behind it is a matter of
the thread that loads or runs a session, so that each model is counted and bounded apart from the others.
"""

from __future__ import annotations

import ctypes
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).with_name("_native.so")
# The native library's own number (antiphon_native_version in native/register.cc): raise both together.
NATIVE_VERSION = 3

_HANDLE = ctypes.c_void_p  # of an allocator; None is the process's
_BUILD_IT = "install antiphon again (or `make stubs` in a checkout) to build it"


class WorkspaceError(Exception):
    """The native library is missing or does not fit its surroundings; the message names the file and says to what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkspaceStats:
    """Counters of the allocator, all in bytes but the last two.

    in_use_bytes and peak_bytes count what was asked for, without rounding; peak_bytes since the last `reset_peak`.
    reserved_bytes is held from the operating system, cached_bytes the part of it nobody uses. limit_bytes 0 is none.
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
    """A counting allocator: the process's, or one of its own. Thread-safe.

    What is read between `reset_peak` and `stats` covers every thread that used it meanwhile. With the last reference to
    one of its own, all that it does not lend goes back to the operating system, and later what it lent.
    Raises WorkspaceError when the library cannot be loaded.
    """

    def __init__(self, library: Path = LIBRARY, *, is_own: bool = False) -> None:
        self.library = library
        self._highest_bytes = 0
        try:
            self._native = ctypes.CDLL(str(library))
            _check_version(self._native)
            self._stats = _function(self._native, "stats", _HANDLE, ctypes.POINTER(_NativeStats))
            self._set_limit = _function(self._native, "set_limit", _HANDLE, ctypes.c_uint64)
            self._reset_peak = _function(self._native, "reset_peak", _HANDLE)
            self._trim = _function(self._native, "trim", _HANDLE)
            self._use = _function(self._native, "use", _HANDLE, returns=_HANDLE)
            self._handle = _function(self._native, "create", returns=_HANDLE)() if is_own else None
            if is_own:
                weakref.finalize(self, _function(self._native, "close", _HANDLE), self._handle)
        except (OSError, AttributeError) as error:
            raise WorkspaceError(f"{library} cannot be used: {error}; {_BUILD_IT}") from None

    def enter(self) -> int | None:
        """Make this thread's sessions allocate here; returns what they used, for `leave`.

        A pair of calls and no context manager, for the engine's thread makes it around every run.
        """
        previous: int | None = self._use(self._handle)
        return previous

    def leave(self, previous: int | None) -> None:
        """Make this thread's sessions allocate again where they did before `enter`."""
        self._use(previous)

    @property
    def highest_bytes(self) -> int:
        """The largest peak_bytes there ever was, whatever was reset."""
        return max(self._highest_bytes, self.stats().peak_bytes)

    def reset_peak(self) -> WorkspaceStats:
        """Let peak_bytes start again from in_use_bytes; returns the counters of before."""
        before = self.stats()
        self._highest_bytes = max(self._highest_bytes, before.peak_bytes)
        self._reset_peak(self._handle)
        return before

    def trim(self) -> None:
        """Give what nobody uses back to the operating system."""
        self._trim(self._handle)

    def attach(self, options: Any) -> None:
        """Make the sessions built from these onnxruntime.SessionOptions allocate from us, weights included.

        Raises WorkspaceError when this ONNX Runtime is not one the library was built for, or ANTIPHON_CPU asks for an
        instruction set that there is not.
        """
        try:
            options.register_custom_ops_library(str(self.library))
        except Exception as error:  # onnxruntime's exceptions share no narrower base
            reason = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error))
            raise WorkspaceError(f"{self.library} cannot be used: {reason}") from None
        options.add_session_config_entry("session.use_env_allocators", "1")

    def stats(self) -> WorkspaceStats:
        """Read the counters, all of one moment."""
        native = _NativeStats()
        self._stats(self._handle, ctypes.byref(native))
        return WorkspaceStats(**{name: getattr(native, name) for name in WorkspaceStats.__slots__})

    def limit_growth(self, budget_bytes: int | None) -> None:
        """Let reserved_bytes grow by at most this much over what is in use now; None lifts the limit.

        A run that needs more raises from ONNX Runtime and gives back what it held; its session stays usable.
        """
        if budget_bytes is None:
            self._set_limit(self._handle, 0)
            return
        self.trim()
        self._set_limit(self._handle, self.stats().reserved_bytes + budget_bytes)


def _check_version(native: ctypes.CDLL) -> None:
    """Raises OSError for a library of another version of this package."""
    version = getattr(native, "antiphon_native_version", None)
    found = "none" if version is None else version()
    if found != NATIVE_VERSION:
        raise OSError(f"its version is {found}, this antiphon needs {NATIVE_VERSION}")


def _function(native: ctypes.CDLL, name: str, *arguments: Any, returns: Any = None) -> Callable[..., Any]:
    function = getattr(native, f"antiphon_workspace_{name}")
    function.argtypes = arguments
    function.restype = returns
    return function  # type: ignore[no-any-return]
