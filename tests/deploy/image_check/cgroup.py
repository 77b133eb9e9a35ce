"""Memory that the kernel counts for the control group of a process, of version 1 or 2."""

from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory of one control group, in bytes. peak_bytes: its maximum, page cache included."""

    limit_bytes: int
    peak_bytes: int


def memory_of(pid: int) -> Memory:
    """Return the memory of the control group of a process. Raises OSError if the process or its files are gone."""
    groups = dict(line.split(":", 2)[1:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines())
    if "memory" in groups:  # version 1
        folder = _ROOT / "memory" / groups["memory"].lstrip("/")
        return Memory(
            limit_bytes=_read(folder, "memory.limit_in_bytes"), peak_bytes=_read(folder, "memory.max_usage_in_bytes")
        )
    folder = _ROOT / groups[""].lstrip("/")
    return Memory(limit_bytes=_read(folder, "memory.max"), peak_bytes=_read(folder, "memory.peak"))


def _read(folder: Path, name: str) -> int:
    text = (folder / name).read_text().strip()
    return 1 << 63 if text == "max" else int(text)
