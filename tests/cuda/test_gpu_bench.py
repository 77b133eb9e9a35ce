"""The GPU benchmark on the stand-in for CUDA: every part runs and writes its figures. They mean nothing here."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from antiphon.model.ops.cuda.driver import CudaDevice
from antiphon.service.tools.bench.gpu.__main__ import run


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_part_writes_its_figures(tmp_path: Path, device: CudaDevice) -> None:
    run(
        device,
        argparse.Namespace(
            folder=tmp_path,
            part=["bandwidth", "parity", "decode", "switches"],
            shape="tiny",
            rows=[1],
            sources=[5],
            steps=2,
            copy_bytes=1 << 16,
            budget_s=1e9,
        ),
    )
    figures = {path.stem: json.loads(path.read_text())[path.stem] for path in tmp_path.glob("*.json")}
    assert set(figures) == {"bandwidth", "parity", "decode", "switches"}
    assert figures["parity"]["equal_greedy_tokens"]["float32"] == 1.0
    assert figures["decode"][0]["rows"] == 1
    assert figures["decode"][0]["decode_tokens_per_s"] > 0
    assert [one.get("captures", True) for one in figures["switches"]] == [True, False] * 2
