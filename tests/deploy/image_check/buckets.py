"""A local bucket for the component bundle-s3: moto serves S3, and rclone downloads as in the pod of a cluster."""

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.deploy.image_check.podman import PATIENCE_S, CheckError, Podman

# First address of podman's network: the address of this machine for containers.
GATEWAY = "10.88.0.1"
PATH = "models/antiphon/en-de/1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "a secret of nobody"}


class Bucket:
    """S3 server with one bucket."""

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
        """Replace the content of the bucket by a directory. Raises CheckError."""
        types = {"RCLONE_CONFIG_STORAGE_TYPE": "s3", "RCLONE_CONFIG_STORAGE_ENV_AUTH": "true"}
        given = [f"--env={name}={value}" for name, value in (self.settings | CREDENTIALS | types).items()]
        volume = f"--volume={bundle}:/from:ro"
        for command in (("mkdir", f"storage:{PATH.partition('/')[0]}"), ("sync", "/from", f"storage:{PATH}")):
            self._podman.run("run", "--rm", *given, volume, self._image, "--config=/dev/null", *command)

    def aim(self, objects: list[dict[str, Any]], path: str = PATH) -> None:
        """Configure the rendered component to download from this server."""
        for thing in objects:
            if thing["kind"] == "ConfigMap" and thing["metadata"]["name"].startswith("antiphon-bundle-s3"):
                thing["data"].update(self.settings | {"RCLONE_CONFIG_BUNDLE_REMOTE": f"storage:{path}"})


@contextlib.contextmanager
def bucket(podman: Podman, rclone_image: str, moto: Path) -> Iterator[Bucket]:
    """Serve S3 on a free port of podman's network within the context."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    # On every address, because podman's address exists only while a container runs.
    command = [str(moto), "--host", "0.0.0.0", "--port", str(port)]
    with tempfile.NamedTemporaryFile("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as serving:
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
