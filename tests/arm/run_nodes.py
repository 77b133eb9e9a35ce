"""Program that runs graphs of single operators: pickled graphs and inputs come in, outputs and changed inputs go out.

Runs in an emulated process (emulator.py).
"""

from __future__ import annotations

import ctypes
import pickle
import sys
from functools import cache
from pathlib import Path
from typing import Any

from antiphon.bundle.session import native_session
from antiphon.export.bundle_model import run_native


@cache
def session(model: bytes, threads: int, library: Path) -> Any:
    """Return the session of a graph."""
    return native_session(model, threads, library)


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
            outputs = run_native(session(model, threads, library), inputs)
        except Exception as error:
            answer = RuntimeError(str(error))
        else:
            changed = {name: array for name, array in inputs.items() if array.tobytes() != before[name].tobytes()}
            answer = (outputs, changed)


if __name__ == "__main__":
    main()
