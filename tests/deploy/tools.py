"""Search for the programs that tests of deployment run."""

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# `make deploy-tools` installs packages in LOCKED, and unpacks Debian's packages where PATH has no such program.
LOCKED = ROOT / ".venv-deploy" / "bin"
UNPACKED = ROOT / "build" / "deploy-tools" / "usr"
# Debian keeps nginx out of the PATH of ordinary users.
SYSTEM = Path("/usr/sbin")


def tool(name: str, package: str) -> Path:
    """Return the program `name`: the locked one, else PATH's, else the unpacked one.

    Skips the test if there is none; the reason contains `package`, which describes the installation.
    """
    places = [LOCKED, os.environ.get("PATH", os.defpath), UNPACKED / "bin", UNPACKED / "sbin", SYSTEM]
    found = shutil.which(name, path=os.pathsep.join(map(str, places)))
    if found is None:
        pytest.skip(f"{name} is not on this machine: {package}")
    return Path(found)
