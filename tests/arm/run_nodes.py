"""Program that runs graphs of single operators: pickled graphs and inputs come in, outputs and changed inputs go out.

Runs in an emulated process (emulator.py), and imports nothing that only exports models need.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import onnxruntime as ort
from numpy.typing import NDArray

from antiphon.bundle.session import native_session


@cache
def session(model: bytes, threads: int, library: Path) -> Any:
    """Return the session of a graph."""
    return native_session(model, threads, library)


def run(opened: Any, inputs: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    """Run without copying the inputs; the graph can change them."""
    binding = opened.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in opened.get_outputs():
        binding.bind_output(output.name, "cpu")
    opened.run_with_iobinding(binding)
    return [value.numpy().copy() for value in binding.get_outputs()]


def main() -> None:
    """Answer until the input ends."""
    library = Path(sys.argv[1])
    native = ctypes.CDLL(str(library))
    native.antiphon_kernels.restype = ctypes.c_char_p
    answer: object = native.antiphon_kernels().decode()
    while True:
        pickle.dump(answer, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        try:
            model, threads, inputs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        before = {name: array.copy() for name, array in inputs.items()}
        try:
            outputs = run(session(model, threads, library), inputs)
        except Exception as error:
            answer = RuntimeError(str(error))
        else:
            changed = {name: array for name, array in inputs.items() if array.tobytes() != before[name].tobytes()}
            answer = (outputs, changed)


if __name__ == "__main__":
    main()
