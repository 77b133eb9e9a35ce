"""A disk that fills up during an import leaves no partly written files; damaged bundles are refused before serving."""

import contextlib
import os
import random
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.bundle.manifest import MANIFEST_NAME, load_bundle
from antiphon.cli import main as cli
from antiphon.errors import BundleError
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.disks import disk_of
from tests.integration.process import antiphon
from tests.parity.seq2seq_checkpoints import save
from tests.reliability.sizes import size

pytestmark = pytest.mark.hardship

# Shares of the new bundle that fit on the disk beside the old one, or limits of file sizes.
SHARES = [0.5, 0.02, 0.3, 0.9][: size("DISK_SHARES", 1)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "marian"
    save(folder, "marian")
    return folder


@pytest.fixture(scope="module")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("bundle") / "marian"
    assert imported(checkpoint, target) == 0
    return target


def imported(checkpoint: Path, target: Path, *flags: str) -> int:
    options = ["--no-explain", "--no-verify", "--precision", "float32", *flags]
    return cli.main(["import", str(checkpoint), str(target), *options])


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Limit the size of files like a quota: a longer write raises, and Python ignores the signal SIGXFSZ."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check_refused(code: int, errors: str, target: Path, digests: dict[str, str]) -> None:
    assert code == 2
    line = errors.strip().splitlines()[-1]
    assert line.startswith("antiphon import: ")
    assert "No space left" in line or "File too large" in line
    assert "Traceback" not in errors
    found = load_bundle(target).manifest.files
    assert {name: entry.sha256 for name, entry in found.items()} == digests
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of a size of its own needs root")
@pytest.mark.parametrize("share", SHARES)
def test_full_disk_leaves_only_the_old_bundle(
    share: float, checkpoint: Path, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = {name: entry.sha256 for name, entry in load_bundle(bundle).manifest.files.items()}
    room = round((1 + share) * bytes_of(bundle)) + 65536  # tmpfs counts whole pages
    with disk_of(room, tmp_path / "disk") as disk:
        shutil.copytree(bundle, disk / "marian")
        code = imported(checkpoint, disk / "marian", "--overwrite")
        check_refused(code, capsys.readouterr().err, disk / "marian", digests)


@pytest.mark.parametrize("share", SHARES)
def test_quota_leaves_only_the_old_bundle(
    share: float, checkpoint: Path, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digests = {name: entry.sha256 for name, entry in load_bundle(bundle).manifest.files.items()}
    largest = max(file.stat().st_size for file in bundle.iterdir())
    with files_of_at_most(round(share * largest)):
        code = imported(checkpoint, bundle, "--overwrite")
    check_refused(code, capsys.readouterr().err, bundle, digests)


NAMES = sorted(load_bundle(SHIPPED_BUNDLE).manifest.files)
NUM_DAMAGES = size("DAMAGES", 4)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged") / "en-de"
    shutil.copytree(SHIPPED_BUNDLE, folder)
    return folder


def cut_short(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.choice([0, 1, len(data) // 2, len(data) - 1, rng.randrange(len(data))])]


def with_a_bit_flipped(data: bytes, rng: random.Random) -> bytes:
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


@contextlib.contextmanager
def damaged(file: Path) -> Iterator[bytes]:
    """Yield the content of a file, which is written again at the end."""
    whole = file.read_bytes()
    try:
        yield whole
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", [cut_short, with_a_bit_flipped])
def test_damaged_files_are_refused_by_name(copy: Path, name: str, damage: object) -> None:
    assert callable(damage)
    rng = random.Random(name)
    with damaged(copy / name) as whole:
        for _ in range(NUM_DAMAGES):
            (copy / name).write_bytes(damage(whole, rng))
            with pytest.raises(BundleError, match=re.escape(f"{copy / name} is damaged")):
                load_bundle(copy)


def test_truncated_manifest_is_refused_by_name(copy: Path) -> None:
    with damaged(copy / MANIFEST_NAME) as whole:
        for length in range(0, len(whole.rstrip()), max(1, len(whole) // (25 * NUM_DAMAGES))):
            (copy / MANIFEST_NAME).write_bytes(whole[:length])
            with pytest.raises(BundleError, match=MANIFEST_NAME):
                load_bundle(copy)


def test_serve_names_the_damaged_file_and_exits_with_2(copy: Path) -> None:
    file = copy / "weights.native.int8.bin"
    with damaged(file) as whole:
        file.write_bytes(whole[:-1])
        result = antiphon("serve", str(copy), "--port", "0", "--metrics-port", "0")
    assert (result.returncode, result.stdout) == (2, b"")
    assert f"{file} is damaged" in result.stderr.decode().splitlines()[-1]
