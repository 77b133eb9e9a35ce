"""A real server process whose decoder hangs, raises an error, or waits for the test.

The fault is simulated at the runner's boundary; everything else is the real server.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Runs the following command, with a decoder that is changed after the warm-up of the model.
_FAULTY = """
import sys, threading
from antiphon.runtime.native import NativeRunner
decode, steps = NativeRunner.decode, []
{setup}
def faulty(self, batch):
    steps.append(batch)
    if len(steps) > 1:
        {fault}
    return decode(self, batch)
NativeRunner.decode = faulty
from antiphon.cli.main import main
sys.exit(main(sys.argv[sys.argv.index("serve"):]))
"""


def faulty(fault: str, *, setup: str = "") -> list[str]:
    """Return the prefix of a server that runs `setup` once, and `fault` before each decode step after the warm-up."""
    return [sys.executable, "-c", _FAULTY.format(fault=fault, setup=setup)]


class HeldEngine:
    """Decode steps of one server, each of which waits for permission of the test.

    So the observed state of running requests does not depend on the speed of the machine. The engine reads a byte of a
    pipe before each step.
    """

    def __init__(self, pipe: Path) -> None:
        os.mkfifo(pipe)
        self._allowed = os.open(pipe, os.O_RDWR)  # opening it only to write would wait for the server
        self._is_held = True
        self.prefix = faulty("allowed.read(1)", setup=f"allowed = open({str(pipe)!r}, 'rb', buffering=0)")

    def allow(self, num_steps: int) -> None:
        """Let num_steps more steps begin, immediately or when there is work for them."""
        os.write(self._allowed, bytes(num_steps))

    def release(self) -> None:
        """Let every step begin: no step waits at the end of the pipe."""
        if self._is_held:
            os.close(self._allowed)
        self._is_held = False


@contextlib.contextmanager
def held_engine(folder: Path) -> Iterator[HeldEngine]:
    """Yield a held engine for one server, whose command takes its prefix; released on leaving."""
    engine = HeldEngine(folder / "allowed_steps")
    try:
        yield engine
    finally:
        engine.release()
