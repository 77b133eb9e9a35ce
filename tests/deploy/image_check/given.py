"""What is checked, and how a check fails."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.deploy.image_check.cgroup import Memory
from tests.deploy.image_check.contents import megabytes
from tests.deploy.image_check.podman import CheckError, Podman


@dataclass(frozen=True, kw_only=True, slots=True)
class Given:
    """Images, what `antiphon size` says of a replica (memory in podman's spelling, variables), and streams at once."""

    podman: Podman
    image: str
    bundle_image: str
    rclone_image: str
    memory: str
    settings: Mapping[str, str]
    streams: int


def expect(condition: object, message: str) -> None:
    """Raises CheckError where something is not so."""
    if not condition:
        raise CheckError(message)


def share(memory: Memory) -> str:
    """The peak beside the limit."""
    part = memory.peak_bytes / memory.limit_bytes
    return f"{megabytes(memory.peak_bytes)} of {megabytes(memory.limit_bytes)} ({part:.0%})"
