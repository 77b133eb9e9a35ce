"""Small Debian packages, built by dpkg-deb."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")

NAME, VERSION = "toy-doc", "1:2.0-1"


def build_package(folder: Path, files: Mapping[str, bytes]) -> dict[str, str]:
    """Build toy-doc 1:2.0-1 with these files in `folder`; return the fields name, version and sha256."""
    tree = folder / "tree"
    for name, content in {"DEBIAN/control": b"", **files}.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    (tree / "DEBIAN/control").write_text(
        f"Package: {NAME}\nVersion: {VERSION}\nArchitecture: all\nMaintainer: Nobody <n@example.org>\nDescription: d\n"
    )
    path = folder / f"{NAME}_{VERSION.replace(':', '%3a')}_all.deb"
    subprocess.run(["dpkg-deb", "--build", "--root-owner-group", tree, path], check=True, capture_output=True)
    return {"name": NAME, "version": VERSION, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
