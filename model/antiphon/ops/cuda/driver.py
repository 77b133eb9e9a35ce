"""An NVIDIA GPU through the native library, which opens the driver at run time: memory, copies, streams, kernels.

Torch-free. The Python side of `cuda/native/`. Without a driver or a card every call raises CudaError; the native
library itself loads everywhere.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from antiphon.errors import CudaError
from antiphon.ops.workspace import native_library

_Address = ctypes.c_uint64


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceDescription:
    """Report of the driver on a device. architecture: compute capability times ten. driver_version: 13020 is 13.2."""

    name: str
    architecture: int
    num_multiprocessors: int
    driver_version: int
    total_bytes: int
    free_bytes: int


class _NativeDescription(ctypes.Structure):
    """Mirrors antiphon::CudaDescription in cuda_interface.cc, field by field."""

    _fields_ = [
        ("name", ctypes.c_char * 256),
        ("architecture", ctypes.c_int32),
        ("num_multiprocessors", ctypes.c_int32),
        ("driver_version", ctypes.c_int32),
        ("total_bytes", ctypes.c_uint64),
        ("free_bytes", ctypes.c_uint64),
    ]


@dataclass(frozen=True, slots=True, weakref_slot=True)
class DeviceMemory:
    """Memory of the device; freed with its last reference. address: of the device, which the host cannot read."""

    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PinnedMemory:
    """Memory of the host that the device copies from and to; freed with its last reference."""

    address: int
    array: NDArray[np.uint8]


class CudaDevice:
    """One device. Calls belong to threads that called `use`. Raises CudaError."""

    def __init__(self, ordinal: int = 0) -> None:
        self.ordinal = ordinal
        self.use()
        self._stream = _created("stream_create")
        weakref.finalize(self, _release, ordinal, "stream_destroy", self._stream)

    @property
    def stream(self) -> int:
        """Return the handle of the stream in which all work of this object runs, in order."""
        return self._stream

    def description(self) -> DeviceDescription:
        """Return what the driver reports now."""
        return describe(self.ordinal)

    def use(self) -> None:
        """Make the device current in this thread, and let other threads allocate while a graph is captured."""
        _call("use", self.ordinal)

    def load_kernels(self, path: Path) -> None:
        """Read a library of compiled kernels. Sessions opened from now on can contain our nodes for GPUs."""
        _call("load", self.ordinal, str(path).encode())

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Return memory of at least one byte; its content is undefined."""
        memory = DeviceMemory(_created("allocate", max(num_bytes, 1)), num_bytes)
        weakref.finalize(memory, _release, self.ordinal, "free", memory.address)
        return memory

    def allocate_pinned(self, num_bytes: int) -> PinnedMemory:
        """Return host memory full of zeros."""
        address = _created("allocate_pinned", max(num_bytes, 1))
        array = np.ctypeslib.as_array((ctypes.c_uint8 * max(num_bytes, 1)).from_address(address))
        array[:] = 0
        memory = PinnedMemory(address, array)
        weakref.finalize(memory, _release, self.ordinal, "free_pinned", address)
        return memory

    def copy_in(self, target: int, source: int, num_bytes: int) -> None:
        """Copy from pinned memory to the device, behind all work of the stream."""
        _call("copy_in", target, source, num_bytes, self._stream)

    def copy_out(self, target: int, source: int, num_bytes: int) -> None:
        """Copy from the device to pinned memory, behind all work of the stream."""
        _call("copy_out", target, source, num_bytes, self._stream)

    def copy_within(self, target: int, source: int, num_bytes: int) -> None:
        """Copy inside the device, behind all work of the stream."""
        _call("copy_within", target, source, num_bytes, self._stream)

    def fill(self, target: int, byte: int, num_bytes: int) -> None:
        """Fill memory of the device with a byte, behind all work of the stream."""
        _call("fill", target, byte, num_bytes, self._stream)

    def event(self) -> CudaEvent:
        """Return an event of this device's stream."""
        return CudaEvent(self.ordinal, self._stream)

    def wait(self) -> None:
        """Wait until the stream has no work left; the interpreter lock is released meanwhile."""
        _call("stream_wait", self._stream)


class CudaEvent:
    """A point in a stream that a thread can wait for."""

    def __init__(self, ordinal: int, stream: int) -> None:
        self._stream = stream
        self._handle = _created("event_create")
        weakref.finalize(self, _release, ordinal, "event_destroy", self._handle)

    def record(self) -> None:
        """Move the event behind all work that the stream has now."""
        _call("event_record", self._handle, self._stream)

    def wait(self) -> None:
        """Wait until the stream has reached the event."""
        _call("event_wait", self._handle)


def describe(ordinal: int = 0) -> DeviceDescription:
    """Return what the driver reports of a device. Raises CudaError without a driver or such a device."""
    native = _NativeDescription()
    _call("describe", ordinal, ctypes.addressof(native))
    return DeviceDescription(
        name=native.name.decode(errors="replace"),
        architecture=native.architecture,
        num_multiprocessors=native.num_multiprocessors,
        driver_version=native.driver_version,
        total_bytes=native.total_bytes,
        free_bytes=native.free_bytes,
    )


# Arguments of the functions of the native library, without the pointer to a result, which is the last one.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "describe": (ctypes.c_int, _Address),
    "load": (ctypes.c_int, ctypes.c_char_p),
    "use": (ctypes.c_int,),
    "allocate": (_Address,),
    "free": (_Address,),
    "allocate_pinned": (_Address,),
    "free_pinned": (_Address,),
    "copy_in": (_Address, _Address, _Address, _Address),
    "copy_out": (_Address, _Address, _Address, _Address),
    "copy_within": (_Address, _Address, _Address, _Address),
    "fill": (_Address, ctypes.c_int, _Address, _Address),
    "stream_create": (),
    "stream_destroy": (_Address,),
    "stream_wait": (_Address,),
    "event_create": (),
    "event_destroy": (_Address,),
    "event_record": (_Address, _Address),
    "event_wait": (_Address,),
}
_CREATING = frozenset({"allocate", "allocate_pinned", "stream_create", "event_create"})


def _created(name: str, *arguments: Any) -> int:
    """Call a function that returns a handle or an address."""
    result = _Address()
    _call(name, *arguments, ctypes.byref(result))
    return result.value


def _call(name: str, *arguments: Any) -> None:
    message: bytes | None = _function(name)(*arguments)
    if message is not None:
        raise CudaError(message.decode(errors="replace"))


def _release(ordinal: int, name: str, handle: int) -> None:
    """Free something of a device, in whichever thread drops its last reference.

    An error is ignored: nobody is there to handle it, and the driver frees everything when the process ends.
    """
    _function("use")(ordinal)
    _function(name)(handle)


@cache
def _function(name: str) -> Callable[..., bytes | None]:
    function = getattr(native_library(), f"antiphon_cuda_{name}")
    result = (ctypes.POINTER(_Address),) if name in _CREATING else ()
    function.argtypes = (*_ARGUMENTS[name], *result)
    function.restype = ctypes.c_char_p
    return function  # type: ignore[no-any-return]
