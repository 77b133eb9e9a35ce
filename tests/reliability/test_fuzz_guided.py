"""Short runs of each target of fuzz.py, guided by coverage; `make fuzz` runs them for minutes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.integration.process import environment
from tests.marks import hardship
from tests.reliability.fuzz_targets import TARGETS
from tests.reliability.sizes import size

SECONDS = size("FUZZ_S", 0)
RUNS = 300

pytestmark = [
    hardship,
    pytest.mark.skipif(
        importlib.util.find_spec("atheris") is None, reason="Atheris is not published for this platform"
    ),
]


@pytest.mark.parametrize("target", TARGETS)
def test_fuzz_target_finds_no_error(target: str) -> None:
    limits = ["--seconds", str(SECONDS)] if SECONDS else ["--runs", str(RUNS), "--seed", "1"]
    command = [sys.executable, "-m", "tests.reliability.fuzz", target, *limits]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment(), timeout=SECONDS + 120, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Done " in result.stderr
