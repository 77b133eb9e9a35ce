"""Program that calls every native operator with random arguments, valid and invalid.

Valid calls must succeed, also with unusual numbers; invalid ones must succeed or be refused with the operator's name.
Invalid reads and writes end the process: AddressSanitizer checks a library that was built for it, and half of the
arrays end at a page without access, which also stops loads that no sanitizer checks (tiles, masked vectors).
ANTIPHON_CPU chooses the kernels.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.operators import HIGHEST, LOWEST, NODES, Array, Arrays, Call, Rng, pick, random_call
from tests.parity.native_nodes import run_node

_ODD = [np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-45, -0.0]
_EXTREMES = [-(2**63), LOWEST, -65536, -1, 0, 1, 15, 16, 17, 1000, 65536, HIGHEST, 2**63 - 1]
# Attributes that determine sizes. Another test covers the others, such as the name of an activation.
_SIZES = ("width", "vocab", "num_heads", "layer")
# Sampling parameters: the operator checks each number, unlike the numbers that the model computes with.
_CHECKED = ("float_params", "edit_values")


def odd_numbers(rng: Rng, call: Call) -> None:
    """Put numbers that are not finite, or close to the limits, into an array of floats."""
    names = [name for name, array in call[0].items() if array is not None and array.dtype.kind == "f" and array.size]
    names = [name for name in names if name not in _CHECKED]
    if names:
        array = call[0][pick(rng, names)]
        assert array is not None
        array.flat[rng.integers(0, array.size, int(rng.integers(1, 9)))] = pick(rng, _ODD)


def wrong_integers(rng: Rng, call: Call) -> None:
    """Put any integer, or one just out of range, into ids, lengths, positions or block tables."""
    sizes = [size for array in call[0].values() if array is not None for size in array.shape]
    names = [name for name, array in call[0].items() if array is not None and array.dtype.kind == "i" and array.size]
    if not names:
        return wrong_shape(rng, call)
    array = call[0][pick(rng, names)]
    assert array is not None
    limits = np.iinfo(array.dtype)
    for index in rng.integers(0, array.size, int(rng.integers(1, 4))):
        array.flat[index] = np.clip(pick(rng, [*_EXTREMES, *sizes, int(rng.integers(-40, 40))]), limits.min, limits.max)
    return None


def wrong_shape(rng: Rng, call: Call) -> None:
    """Make an array shorter, longer or empty, or change its number of dimensions."""
    name = pick(rng, [name for name, array in call[0].items() if array is not None])
    array = call[0][name]
    assert array is not None
    axis = int(rng.integers(array.ndim))
    changes: list[Callable[[], Array]] = [
        lambda: np.delete(array, np.s_[-1:], axis),
        lambda: np.concatenate([array, array], axis),
        lambda: np.take(array, [], axis),
        lambda: np.zeros([2, *array.shape], array.dtype),
        lambda: array.reshape(-1),
    ]
    call[0][name] = np.ascontiguousarray(pick(rng, changes)())


def wrong_attribute(rng: Rng, call: Call) -> None:
    """Set an attribute to any size."""
    name = pick(rng, [name for name in call[1] if name in _SIZES] or [None])
    if name is None:
        return wrong_shape(rng, call)
    call[1][name] = pick(rng, _EXTREMES)
    return None


def scalars(rng: Rng, call: Call) -> None:
    """Put numbers that are not finite into the sampling parameters, or random floats into any array."""
    for array in call[0].values():
        if array is not None and array.dtype.kind == "f" and array.size:
            array.flat[int(rng.integers(array.size))] = pick(rng, [*_ODD, -1.0])


BAD = (wrong_integers, wrong_integers, wrong_shape, wrong_shape, wrong_attribute, scalars)

_libc = ctypes.CDLL(None, use_errno=True)


def at_end_of_page(array: Array) -> Array:
    """Return a copy that ends at the beginning of memory without access."""
    if array.size == 0:
        return array
    size = -(-array.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _libc.mprotect(ctypes.c_void_p(begin + size), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = np.frombuffer(memory, array.dtype, array.size, size - array.nbytes).reshape(array.shape)
    copy[...] = array
    return copy


def refusal(op_type: str, call: Call, rng: Rng, library: Path) -> str | None:
    """Return the operator's error message; None if it ran."""
    arrays: Arrays = {
        name: at_end_of_page(array) if array is not None and rng.random() < 0.5 else array
        for name, array in call[0].items()
    }
    try:
        run_node(op_type, arrays, threads=pick(rng, [1, 1, 1, 2]), library=library, **call[1])
    except Exception as error:  # onnxruntime's exceptions share no narrower base
        return str(error)
    return None


def run_one(op_type: str, index: int, seed: int, library: Path) -> str | None:
    """Make one call, valid if the index is divisible by 3. Return the error in its result, or None."""
    rng = np.random.default_rng([seed, index, list(NODES).index(op_type)])
    call = random_call(op_type, rng)
    is_good = index % 3 == 0
    with np.errstate(over="ignore"):  # float16 turns numbers beyond its range into infinities
        if not is_good:
            pick(rng, BAD)(rng, call)
        elif index % 2:
            odd_numbers(rng, call)
    message = refusal(op_type, call, rng, library)
    if message is None or (not is_good and f"antiphon.{op_type}: " in message):
        return None
    return f"a {'good' if is_good else 'bad'} call was answered: {message}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path)
    parser.add_argument("--rounds", type=int, default=100, help="calls of each operator")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for index in range(args.rounds):
        for op_type in NODES:
            # If a call ends the process, the last of these lines names it.
            print(f"seed {args.seed}: {op_type} {index}", flush=True)
            if wrong := run_one(op_type, index, args.seed, args.library):
                print(wrong, file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
