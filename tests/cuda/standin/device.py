"""The stand-in for CUDA in this process: its libraries, its counters, and its kernels, which the interpreter runs."""

from __future__ import annotations

import ctypes
import struct
import traceback
from collections.abc import Sequence
from pathlib import Path

from antiphon.ops.cuda import library_name
from antiphon.ops.cuda.compile_kernels import Image, write_library
from antiphon.ops.cuda.nodes import Parameter, Variant, variants
from tests.cuda import interpreter
from tests.cuda.standin.build import LIBRARIES, build

ARCHITECTURE = 90
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, *(ctypes.c_uint,) * 3, ctypes.POINTER(ctypes.c_uint64))


class StandIn:
    """The loaded stand-in. Load it before the CUDA provider, which then finds these libraries instead of CUDA's.

    is_built: another process wrote the folder's files. launched: names of the kernels that ran, in their order. order:
    in which order the programs of a kernel run.
    """

    def __init__(self, folder: Path, *, is_built: bool = False) -> None:
        self.kernels = folder / library_name(ARCHITECTURE)
        if not is_built:
            build(folder)
            write_kernels(self.kernels)
        libraries = [ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in LIBRARIES]
        self._core = libraries[0]
        self._core.standin_host_view.restype = ctypes.c_void_p
        self._core.standin_host_view.argtypes = (ctypes.c_void_p,)
        self._core.standin_bytes_in_use.restype = ctypes.c_uint64
        self._variants = {variant.name: variant for variant in variants()}
        self._launch = _LAUNCH(self._run)
        self._core.standin_set_launch(self._launch)
        self.launched: list[str] = []
        self.order: interpreter.Order = interpreter.in_order

    @property
    def num_foreign_launches(self) -> int:
        """Return how often a kernel of ONNX Runtime's own was launched."""
        return int(self._core.standin_foreign_launches())

    @property
    def num_missing_calls(self) -> int:
        """Return how often a function that the stand-in lacks was called."""
        return int(self._core.standin_missing_calls())

    @property
    def num_allocations(self) -> int:
        """Return how often memory of the device was allocated."""
        return int(self._core.standin_allocations())

    @property
    def bytes_in_use(self) -> int:
        """Return the bytes of memory of the device that are allocated now."""
        return int(self._core.standin_bytes_in_use())

    def fail_after(self, countdown: int) -> None:
        """Make the call number `countdown` from now that can fail, fail; 0 is never."""
        self._core.standin_fail_after(countdown)

    def set_architecture(self, architecture: int) -> None:
        """Set what the device says it is."""
        self._core.standin_set_architecture(architecture)

    def host_view(self, address: int) -> int:
        """Return the address at which the host can read memory of the device."""
        return int(self._core.standin_host_view(address) or 0)

    def _run(self, name: bytes, x: int, y: int, z: int, arguments: Sequence[int]) -> int:
        """Run a kernel; return 0, or 1 after an error was printed."""
        try:
            variant = self._variants[name.decode()]
            given = enumerate(variant.parameters)
            values = [self._value(parameter, arguments[index]) for index, parameter in given]
            interpreter.launch(variant.name, (x, y, z), values, self.order)
            self.launched.append(variant.name)
        except Exception:
            traceback.print_exc()
            return 1
        return 0

    def _value(self, parameter: Parameter, bits: int) -> int | float:
        """Return an argument as the interpreter takes it."""
        if parameter.port is not None:
            return self.host_view(bits) if bits else 0
        packed = struct.pack("<Q", bits)[:4]
        kind = "<f" if parameter.letter == "f" else "<i"
        value: int | float = struct.unpack(kind, packed)[0]
        return value


def write_kernels(path: Path, architecture: int = ARCHITECTURE) -> None:
    """Write a library file whose images the stand-in understands: the variant's name and its number of arguments."""
    write_library(path, architecture, [_image(variant) for variant in variants()])


def _image(variant: Variant) -> Image:
    num_arguments = len(variant.parameters)
    code = f"{variant.name} {num_arguments}\0".encode("ascii")
    # So much shared memory must be asked for, as the larger kernels do.
    return Image(variant=variant, code=code, num_warps=variant.num_warps, shared_bytes=64 << 10)
