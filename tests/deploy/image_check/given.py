"""Subject of the checks, and their error."""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.deploy.image_check.cgroup import Memory
from tests.deploy.image_check.contents import megabytes
from tests.deploy.image_check.podman import CheckError, Podman


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Images, the size of a replica by `antiphon size` (memory in podman's notation, variables), and streams."""

    podman: Podman
    image: str
    bundle_image: str
    rclone_image: str
    memory: str
    settings: Mapping[str, str]
    streams: int


def expect(condition: object, message: str) -> None:
    if not condition:
        raise CheckError(message)


def share(memory: Memory) -> str:
    """Describe the peak relative to the limit."""
    part = memory.peak_bytes / memory.limit_bytes
    return f"{megabytes(memory.peak_bytes)} of {megabytes(memory.limit_bytes)} ({part:.0%})"
