"""Finds the programs that tests of deployment run, wherever a newcomer may have put them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Debian keeps nginx out of the PATH of ordinary users; the rest is what `make deploy-tools` unpacks and installs.
UNPACKED = ROOT / "build" / "deploy-tools" / "usr"
PLACES = (ROOT / ".venv-deploy" / "bin", UNPACKED / "bin", UNPACKED / "sbin", Path("/usr/sbin"))


def tool(name: str, package: str) -> Path:
    """The program `name`, from PATH or where `make deploy-tools` puts it.

    Skips the test that asks where there is none; `package` says in the reason how to get it.
    """
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *map(str, PLACES)])
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"{name} is not on this machine: {package}")
    return Path(found)
