"""Models that tests export, in build/test-models: for all processes of a run, and for later runs of the same code."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "test-models"
KEPT_S = 24 * 3600


def kept_model(name: str, write: Callable[[Path], object]) -> Path:
    """Return the folder of a model. Nobody may change it.

    write: writes the model into an empty folder, once: other processes wait. It may depend on nothing but the name, the
    code of the model packages and this folder of tests.
    """
    folder = FOLDER / _code() / name
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = Path(tempfile.mkdtemp(dir=folder.parent))
            try:
                write(made)
            except BaseException:
                shutil.rmtree(made)
                raise
            made.rename(folder)
    return folder


@cache
def _code() -> str:
    """Return a digest of the code that writes models, and remove what other code wrote and no run used for a day."""
    digest = hashlib.sha256(f"{version('torch')} {version('onnxscript')}".encode())
    sources = [*ROOT.glob("model/antiphon/**/*.py"), *ROOT.glob("model/antiphon/ops/*.so"), *ROOT.glob("tests/**/*.py")]
    for path in sorted(path for path in sources if "lab" not in path.parts and not path.name.startswith("test_")):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    code = digest.hexdigest()[:16]
    own = FOLDER / code
    own.mkdir(parents=True, exist_ok=True)
    own.touch()
    for other in FOLDER.iterdir():
        if time.time() - other.stat().st_mtime > KEPT_S:
            shutil.rmtree(other, ignore_errors=True)
    return code
