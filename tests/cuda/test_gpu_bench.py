"""The GPU benchmark on the stand-in for CUDA: every part runs and writes its figures. They mean nothing here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.ops.cuda.driver import CudaDevice
from antiphon.tools.bench.gpu.__main__ import run


def measure(device: CudaDevice, folder: Path, parts: list[str], work: Path | None = None) -> dict[str, Any]:
    """Run parts at the smallest sizes; return their figures by name."""
    sizes = {"shape": "tiny", "rows": [1], "sources": [5], "steps": 2, "copy_bytes": 1 << 16, "budget_s": 1e9}
    run(device, argparse.Namespace(folder=folder, part=parts, work=work, **sizes))
    return {path.stem: json.loads(path.read_text())[path.stem] for path in folder.glob("*.json")}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_part_writes_its_figures(tmp_path: Path, device: CudaDevice) -> None:
    figures = measure(device, tmp_path, ["bandwidth", "parity", "decode", "switches"])
    assert set(figures) == {"bandwidth", "parity", "decode", "switches"}
    assert figures["parity"]["equal_greedy_tokens"]["float32"] == 1.0
    assert figures["decode"][0]["rows"] == 1
    assert figures["decode"][0]["decode_tokens_per_s"] > 0
    assert [one.get("captures", True) for one in figures["switches"]] == [True, False] * 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_models_of_a_work_folder_are_used_again(tmp_path: Path, device: CudaDevice) -> None:
    work = tmp_path / "work"
    measure(device, tmp_path / "first", ["parity", "decode"], work)
    weights = {path: path.stat().st_mtime_ns for path in work.rglob("*.bin")}
    measure(device, tmp_path / "second", ["parity", "decode"], work)
    assert {path.parent.parent.name for path in weights} == {"parity", "tiny"}
    assert {path: path.stat().st_mtime_ns for path in work.rglob("*.bin")} == weights
