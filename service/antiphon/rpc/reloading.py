"""Reloads files when they change, so that certificates and tokens are renewed while the server runs.

If a change cannot be read, it is logged and counted, and the previous value stays in use.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, Literal, TypeVar, get_args

from prometheus_client import Gauge

from antiphon.client.connection import read_regular
from antiphon.observability.metrics import MetricFamilies

log = logging.getLogger(__name__)

Result = Literal["ok", "failed"]
T = TypeVar("T")

# Modification time in nanoseconds, inode and size of the target of a symlink, because orchestrators swap symlinks.
_State = tuple[tuple[int, int, int] | None, ...]


class FileProblem(Exception):
    """A certificate or token file cannot be used. The message names the setting, the file and the fault."""


class Reloading(Generic[T]):
    """Current value of files. Thread-safe: gRPC calls from its own threads."""

    def __init__(self, files: Sequence[Path], read: Callable[[], T], on_reload: Callable[[Result], None]) -> None:
        """Read the files. Raises FileProblem.

        read: returns the value of all files, or raises FileProblem. on_reload: called with the result of every reload.
        """
        self._files = tuple(files)
        self._read = read
        self._on_reload = on_reload
        self._lock = threading.Lock()
        # Taken before reading: a file that changes during the reading is read again, so half a file is never kept.
        self._state = self._look()
        self._value = read()

    def current(self) -> T:
        """Return the value of the files as they are now, or as they were last read without error."""
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
            log.error("%s; the previous content stays in use", problem)
            self._on_reload("failed")
        else:
            log.info("reloaded %s", names)
            self._on_reload("ok")

    def _look(self) -> _State:
        return tuple(_state_of(file) for file in self._files)


def read_bytes(setting: str, path: Path, max_bytes: int) -> bytes:
    """Return a regular file's content. Raises FileProblem if it is not regular, too large or unreadable."""
    try:
        return read_regular(path, max_bytes)
    except OSError as error:
        raise FileProblem(f"{setting} is {path}, which cannot be read: {error.strerror}") from None


def is_readable_by_others(path: Path) -> bool:
    """Return whether every user of this machine may read a file."""
    try:
        return bool(path.stat().st_mode & 0o004)
    except OSError:
        return False


def _state_of(file: Path) -> tuple[int, int, int] | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


class FileMetrics:
    """Metrics of reloaded files. Thread-safe, because files are read from several threads."""

    def __init__(self, families: MetricFamilies) -> None:
        self._families = families
        self._expiry: Gauge | None = None
        for family in (families.tls_reloads, families.token_reloads):
            for result in get_args(Result):
                family.labels(result)

    def count_tls(self, result: Result) -> None:
        """Count a reload of certificates."""
        self._families.tls_reloads.labels(result).inc()

    def count_tokens(self, result: Result) -> None:
        """Count a reload of a token file."""
        self._families.token_reloads.labels(result).inc()

    def set_certificate_expiry(self, expires_s: float) -> None:
        """Report the expiry of the certificate in use, in Unix time."""
        if self._expiry is None:
            self._expiry = self._families.certificate_expiry()
        self._expiry.set(expires_s)
