"""A bucket of this machine for the component bundle-s3: moto speaks S3, rclone fetches, as in the pod of a cluster."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.deploy.image_check.podman import PATIENCE_S, CheckError, Podman

# The first address of podman's own network: this machine, as containers see it.
GATEWAY = "10.88.0.1"
PATH = "models/antiphon/en-de/1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "a secret of nobody"}


class Bucket:
    """S3 with one bucket."""

    def __init__(self, podman: Podman, rclone_image: str, endpoint: str) -> None:
        self._podman = podman
        self._image = rclone_image
        self.settings = {
            "RCLONE_CONFIG_BUNDLE_REMOTE": f"storage:{PATH}",
            "RCLONE_CONFIG_STORAGE_PROVIDER": "Other",
            "RCLONE_CONFIG_STORAGE_REGION": "us-east-1",
            "RCLONE_CONFIG_STORAGE_ENDPOINT": endpoint,
        }

    def put(self, bundle: Path) -> None:
        """Make the bucket hold a directory, and nothing else. Raises CheckError."""
        types = {"RCLONE_CONFIG_STORAGE_TYPE": "s3", "RCLONE_CONFIG_STORAGE_ENV_AUTH": "true"}
        given = [f"--env={name}={value}" for name, value in (self.settings | CREDENTIALS | types).items()]
        volume = f"--volume={bundle}:/from:ro"
        for command in (("mkdir", f"storage:{PATH.partition('/')[0]}"), ("sync", "/from", f"storage:{PATH}")):
            self._podman.run("run", "--rm", *given, volume, self._image, "--config=/dev/null", *command)

    def aim(self, objects: list[dict[str, Any]], path: str = PATH) -> None:
        """Let the rendered component fetch from here."""
        for thing in objects:
            if thing["kind"] == "ConfigMap" and thing["metadata"]["name"].startswith("antiphon-bundle-s3"):
                thing["data"].update(self.settings | {"RCLONE_CONFIG_BUNDLE_REMOTE": f"storage:{path}"})


@contextlib.contextmanager
def bucket(podman: Podman, rclone_image: str, moto: Path) -> Iterator[Bucket]:
    """Serve S3 on a free port of podman's network for as long as the context."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    # On every address: podman's own is there only while a container is.
    command = [str(moto), "--host", "0.0.0.0", "--port", str(port)]
    with (
        tempfile.NamedTemporaryFile("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as serving,
    ):
        try:
            _wait(Path(log.name))
            yield Bucket(podman, rclone_image, f"http://{GATEWAY}:{port}")
        finally:
            serving.terminate()
            serving.wait(PATIENCE_S)


def _wait(log: Path) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        if "Running on http" in log.read_text():
            return
        time.sleep(0.1)
    raise CheckError(f"moto_server does not serve: {log.read_text()}")
