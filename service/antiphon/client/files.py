"""Reading of files that settings and flags name: certificates, keys, tokens. Imports the standard library only."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. A read of a FIFO or a terminal could block forever.

    Raises OSError, with the reason in strerror, for another kind of file, a file larger than max_bytes and an
    unreadable file.
    """
    with open(path, "rb", opener=_open_at_once) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {max_bytes} bytes")
    return content


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
