"""A memory limit as in a container: a separate control group, mounted at the usual path."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited_memory(name: str, limit_bytes: int) -> Iterator[tuple[str, ...]]:
    """Return a prefix that runs a command under a limit, with control groups 1 or 2. Skips if they are not allowed."""
    place, file = (ROOT / "memory", "memory.limit_in_bytes") if (ROOT / "memory").is_dir() else (ROOT, "memory.max")
    group = place / name
    if os.geteuid() != 0:
        pytest.skip("only root makes control groups")
    try:
        group.mkdir(exist_ok=True)
        (group / file).write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    # In a separate mount namespace the group has the same path as in a container.
    script = f'echo $$ > {group}/cgroup.procs && mount --bind {group} {place} && exec "$@"'
    try:
        yield ("unshare", "--mount", "sh", "-c", script, "sh")
    finally:
        group.rmdir()
