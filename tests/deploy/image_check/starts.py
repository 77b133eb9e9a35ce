"""First second of a container: time until it serves, and the effect of a SIGTERM."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.deploy.image_check.podman import PATIENCE_S, Container, Podman

MOMENTS_S = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
# Time for a process to end after the signal; a process that missed the signal would continue to serve.
_HEARD_WITHIN_S = 5.0
# With these settings Python finds no bytecode, as if the image and its standard library had none.
NO_BYTECODE = {"PYTHONPYCACHEPREFIX": "/nowhere"}


def ready_after_s(podman: Podman, image: str, memory: str, settings: dict[str, str]) -> float:
    """Return seconds from the first process to the ready line, the best of three starts."""
    times = []
    for _ in range(3):
        with Container.start(podman, image, memory=memory, settings=settings) as container:
            times.append(container.ready_after_s())
    return min(times)


def ends_after_s(podman: Podman, image: str, moment_s: float, options: Sequence[str] = ()) -> float | None:
    """Return seconds from a SIGTERM, sent moment_s after the start, to the end of the process; None if it continues."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pid"
        starting = threading.Thread(target=_start, args=(podman, image, file, options))
        starting.start()
        pid = _pid(file)
        time.sleep(moment_s)  # not a wait for an event: the moment of the signal is the parameter
        sent_s = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        ended_after_s = _ended_after_s(pid, sent_s)
        starting.join()
        podman.attempt("rm", "--force", "--time=0", _name(file))
    return ended_after_s


def _start(podman: Podman, image: str, file: Path, options: Sequence[str]) -> None:
    podman.attempt("run", "-d", "--read-only", f"--pidfile={file}", f"--name={_name(file)}", *options, image, "serve")


def _name(file: Path) -> str:
    return f"image-check-{file.parent.name.lower().replace('_', '-')}"


def _pid(file: Path) -> int:
    """Return the first process as soon as the runtime has written its id, before it starts to run."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        if file.exists() and (text := file.read_text()).isdecimal() and _runs_image(int(text)):
            return int(text)
        time.sleep(0.001)
    raise TimeoutError("no container has begun")


def _runs_image(pid: int) -> bool:
    """Return whether the process already runs the image's program, and not the runtime that prepares it."""
    try:
        return b"antiphon" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _ended_after_s(pid: int, sent_s: float) -> float | None:
    while time.monotonic() < sent_s + _HEARD_WITHIN_S:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            state = "X"
        if state in "XZ":
            return time.monotonic() - sent_s
        time.sleep(0.002)
    return None
