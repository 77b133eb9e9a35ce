"""Pods of rendered manifests with bundles from other places, and with damaged bundles."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.deploy.image_check import kube, traffic
from tests.deploy.image_check.buckets import CREDENTIALS, bucket
from tests.deploy.image_check.given import Given, expect, share
from tests.deploy.image_check.podman import CheckError, Container
from tests.deploy.tools import ROOT

BUNDLE = ROOT / "model" / "antiphon" / "bundles" / "en-de"
Objects = list[dict[str, Any]]


def check_overlay(given: Given) -> None:
    overlay = next(path for name in ("overlays/cpu", "base") if (path := ROOT / "deploy" / name).exists())
    _play(given, kube.rendered(_program("kubectl"), overlay), f"deploy/{overlay.relative_to(ROOT / 'deploy')}")


def check_bundle_image(given: Given) -> None:
    """Check a bundle that an init container copies from its image."""
    _play(given, _with("bundle-image"), "components/bundle-image")


def check_bundle_pvc(given: Given) -> None:
    """Check a bundle in a claim, which is a volume of that name in podman."""
    given.podman.run("volume", "create", "antiphon-bundle")
    try:
        # U: the volume belongs to the image's user, as fsGroup does it in fill.yaml.
        given.podman.run("run", "--rm", "--volume=antiphon-bundle:/target:U", given.bundle_image)
        _play(given, _with("bundle-pvc"), "components/bundle-pvc")
    finally:
        given.podman.attempt("volume", "rm", "antiphon-bundle")


def check_bundle_s3(given: Given) -> None:
    """Check a bundle in a bucket, an empty path, and a bundle with damaged weights."""
    with (
        bucket(given.podman, given.rclone_image, _program("moto_server")) as s3,
        kube.secret(given.podman, "antiphon-bundle-s3", CREDENTIALS),
        tempfile.TemporaryDirectory() as folder,
    ):
        s3.put(_copy(Path(folder)))
        objects = _with("bundle-s3")
        s3.aim(objects)
        _play(given, objects, "components/bundle-s3")
        s3.aim(objects, "models/nothing/here")
        text = _failure(given, objects)
        expect("manifest.json" in text, f"a path with nothing in it is answered by: {text}")
        print(f"  a path with nothing in it: {text}")
        damaged = _damage(Path(folder) / "bundle")
        s3.put(damaged.parent)
        s3.aim(objects)
        text = _failure(given, objects)
        expect(damaged.name in text, f"a damaged bundle is answered by: {text}")
        print(f"  one bit of {damaged.name} turned in the bucket: {text}")


def check_damaged(given: Given) -> None:
    with tempfile.TemporaryDirectory() as folder:
        damaged = _damage(_copy(Path(folder)))
        options = (f"--volume={damaged.parent}:/bundle:ro",)
        with Container.start(
            given.podman, given.image, ("serve", "/bundle"), memory=given.memory, options=options
        ) as one:
            code = one.exit_code()
            expect(code == 2 and damaged.name in one.log, f"a damaged bundle ends with {code}: {one.log}")
            print(f"one bit of {damaged.name} turned: exit code {code}, {one.log.strip().splitlines()[-1]}")


def _play(given: Given, objects: Objects, title: str) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        kube.playing(given.podman, kube.playable(objects), Path(folder)) as container,
    ):
        after_s = container.ready_after_s()
        target = f"{kube.pod_address(given.podman)}:50051"
        alone = asyncio.run(traffic.answers_alone(target))
        expect(asyncio.run(traffic.is_same_in_a_crowd(target, given.streams, alone)), "an answer in the crowd differs")
        memory, facts = container.memory(), given.podman.inspect(container.name)
        bundle = container.execute("sh", "-c", "echo ${ANTIPHON_BUNDLE:-the shipped one}").stdout.strip()
        print(f"{title}: ready after {after_s:.2f} s, bundle: {bundle}; {given.streams} streams, all as alone")
        print(f"  user {facts['Config']['User']}, read-only root {facts['HostConfig']['ReadonlyRootfs']}")
        print(f"  memory: peak {share(memory)}")
        expect((code := container.stop()) == 0, f"exit code {code}; {container.log}")
        print("  SIGTERM: left with exit code 0")


def _failure(given: Given, objects: Objects) -> str:
    """Return the exit code and last line of a server that cannot serve. Raises CheckError if it exits with 0."""
    with (
        tempfile.TemporaryDirectory() as folder,
        kube.playing(given.podman, kube.playable(objects), Path(folder)) as container,
    ):
        code = container.exit_code()
        expect(code == 2, f"exit code {code}: {container.log}")
        return f"exit code {code}, {container.log.strip().splitlines()[-1]}"


def _with(component: str) -> Objects:
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as folder:
        return kube.rendered_with(_program("kubectl"), component, Path(folder))


def _copy(folder: Path) -> Path:
    """Copy the shipped bundle into a directory that every user can read."""
    path = folder / "bundle"
    shutil.copytree(BUNDLE, path)
    for entry in (folder, path, *path.iterdir()):
        entry.chmod(0o755 if entry.is_dir() else 0o644)
    return path


def _damage(bundle: Path) -> Path:
    """Flip one bit of the weights and return their file."""
    weights = next(bundle.glob("*.bin"))
    contents = bytearray(weights.read_bytes())
    contents[len(contents) // 2] ^= 1
    weights.write_bytes(contents)
    return weights


def _program(name: str) -> Path:
    found = shutil.which(name)
    if found is None:
        raise CheckError(f"{name} is not here")
    return Path(found)
