"""What files hold, read again when they change: certificates and tokens are renewed under a running server.

Knows neither. A change that cannot be read is logged and counted, and what was read before stays in use.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Literal, TypeVar

from antiphon.client.files import read_regular

log = logging.getLogger(__name__)

Result = Literal["ok", "failed"]
T = TypeVar("T")

# Modification time in nanoseconds, inode and size; of what a symlink points to, as orchestrators swap those.
_State = tuple[tuple[int, int, int] | None, ...]


class FileProblem(Exception):
    """A file of the server's access cannot be used; the message names the setting, the file and what is wrong."""


class Reloading(Generic[T]):
    """The present value of files. Thread-safe: gRPC asks from threads of its own."""

    def __init__(self, files: Sequence[Path], read: Callable[[], T], tell: Callable[[Result], None]) -> None:
        """read: of all the files, called at once; raises FileProblem. tell: hears of every reading after this one."""
        self._files = tuple(files)
        self._read = read
        self._tell = tell
        self._lock = threading.Lock()
        # Looked at before reading: a file that changes meanwhile is read once more, and never half of it for good.
        self._state = self._look()
        self._value = read()

    def current(self) -> T:
        """The value of the files as they are now, or as they last could be read."""
        with self._lock:
            state = self._look()
            if state != self._state:
                self._state = state
                self._renew()
            return self._value

    def _renew(self) -> None:
        names = ", ".join(map(str, self._files))
        try:
            self._value = self._read()
        except FileProblem as problem:
            log.error("%s; what was read before stays in use", problem)
            self._tell("failed")
        else:
            log.info("read %s again", names)
            self._tell("ok")

    def _look(self) -> _State:
        return tuple(_state_of(file) for file in self._files)


def read_bytes(setting: str, path: Path, max_bytes: int) -> bytes:
    """Return a regular file's content. Raises FileProblem where it is none, is larger or cannot be read."""
    try:
        return read_regular(path, max_bytes)
    except OSError as error:
        raise FileProblem(f"{setting} is {path}, which cannot be read: {error.strerror}") from None


def is_readable_by_others(path: Path) -> bool:
    """Whether anybody on this machine may read a file."""
    try:
        return bool(path.stat().st_mode & 0o004)
    except OSError:
        return False


def _state_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
