"""Truncated bundles and bundles with a flipped bit are refused before anything is served, with the file's name."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from antiphon.bundle.manifest import MANIFEST_NAME, load_bundle
from antiphon.errors import BundleError
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.integration.process import antiphon
from tests.marks import hardship
from tests.reliability.sizes import size

pytestmark = hardship

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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", [cut_short, with_a_bit_flipped])
def test_damaged_files_are_refused_by_name(copy: Path, name: str, damage: object) -> None:
    assert callable(damage)
    whole, rng = (copy / name).read_bytes(), random.Random(name)
    try:
        for _ in range(NUM_DAMAGES):
            (copy / name).write_bytes(damage(whole, rng))
            with pytest.raises(BundleError) as caught:
                load_bundle(copy)
            assert f"{copy / name} is damaged" in str(caught.value)
    finally:
        (copy / name).write_bytes(whole)


def test_truncated_manifest_is_refused_by_name(copy: Path) -> None:
    whole = (copy / MANIFEST_NAME).read_bytes()
    try:
        for length in range(0, len(whole.rstrip()), max(1, len(whole) // (25 * NUM_DAMAGES))):
            (copy / MANIFEST_NAME).write_bytes(whole[:length])
            with pytest.raises(BundleError) as caught:
                load_bundle(copy)
            assert MANIFEST_NAME in str(caught.value)
    finally:
        (copy / MANIFEST_NAME).write_bytes(whole)


def test_serve_names_the_damaged_file_and_exits_with_2(copy: Path) -> None:
    name = "weights.native.int8.bin"
    whole = (copy / name).read_bytes()
    try:
        (copy / name).write_bytes(whole[:-1])
        result = antiphon("serve", str(copy), "--port", "0", "--metrics-port", "0")
    finally:
        (copy / name).write_bytes(whole)
    assert (result.returncode, result.stdout) == (2, b"")
    assert f"{copy / name} is damaged" in result.stderr.decode().splitlines()[-1]
