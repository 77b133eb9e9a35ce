"""Runs every check and prints the results: `python -m tests.deploy.image_check`. Exit code 1 if a check fails."""

import argparse
import json
import sys
import tomllib
from collections.abc import Callable

from tests.deploy.image_check import pods, replica
from tests.deploy.image_check.given import Given
from tests.deploy.image_check.podman import CheckError, podman
from tests.deploy.tools import ROOT
from tests.integration.process import antiphon

_VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

_CHECKS: dict[str, Callable[[Given], None]] = {
    "contents": replica.check_contents,
    "hardening": replica.check_hardening,
    "starting": replica.check_starting,
    "limit": replica.check_limit,
    "streams": replica.check_streams,
    "leaving": replica.check_leaving,
    "overlay": pods.check_overlay,
    "bundle-image": pods.check_bundle_image,
    "bundle-pvc": pods.check_bundle_pvc,
    "bundle-s3": pods.check_bundle_s3,
    "damaged": pods.check_damaged,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", default=f"localhost/antiphon:{_VERSION}")
    parser.add_argument("--bundle-image", default=f"localhost/antiphon-bundle:{_VERSION}")
    parser.add_argument(
        "--rclone-image", default="localhost/rclone/rclone:1.70.3", help="as components/bundle-s3 names it"
    )
    parser.add_argument("--streams", type=int, default=64, metavar="N")
    parser.add_argument(
        "--run-option", action="append", default=[], metavar="OPTION", help="of every `podman run`; again for each"
    )
    parser.add_argument("--only", choices=list(_CHECKS), action="append", help="again for each; default: all")
    arguments = parser.parse_args()
    memory, settings = _sized()
    said = ", ".join(f"{key}={value}" for key, value in settings.items())
    print(f"antiphon size: {memory / (1 << 20):.0f} MiB for {said}")
    with podman(arguments.run_option) as program:
        given = Given(
            podman=program,
            image=arguments.image,
            bundle_image=arguments.bundle_image,
            rclone_image=arguments.rclone_image,
            memory=f"{memory}b",
            settings={f"ANTIPHON_{key.upper()}": str(value) for key, value in settings.items()},
            streams=arguments.streams,
        )
        try:
            for name in arguments.only or _CHECKS:
                print(f"\n== {name}", flush=True)
                _CHECKS[name](given)
        except CheckError as error:
            print(f"image-check: {error}", file=sys.stderr)
            return 1
    print("\nevery check passed")
    return 0


def _sized() -> tuple[int, dict[str, int]]:
    """Return the memory limit of `antiphon size` for a replica of the shipped bundle, and its settings."""
    done = antiphon("size", "--json")
    if done.returncode:
        raise CheckError(done.stderr.decode())
    size = json.loads(done.stdout)
    return size["memory_limit_bytes"], size["settings"]


if __name__ == "__main__":
    sys.exit(main())
