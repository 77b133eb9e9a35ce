"""Sessions of every kind with graphs built by hand: equal logits, and the files of a profile."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from antiphon.bundle.session import plain_session, profiling, serving_session
from antiphon.ops.workspace import Workspace
from tests.unit.graphs.tiny_graphs import tiny_config, tiny_model, write_bundle

SOURCE = {"input_ids": np.array([[5, 6, 7, 2]], np.int64)}


def test_serving_and_plain_sessions_are_bit_identical(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "tiny", tiny_model(tiny_config())).file("encoder.contrib.onnx")
    served, plain = serving_session(path, 1, Workspace(is_own=True)), plain_session(path)
    for found, expected in zip(served.run(None, SOURCE), plain.run(None, SOURCE), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_serving_session_writes_a_profile_only_when_it_was_opened_with_one(tmp_path: Path) -> None:
    path = write_bundle(tmp_path / "tiny", tiny_model(tiny_config())).file("encoder.contrib.onnx")
    workspace = Workspace(is_own=True)
    with profiling(tmp_path / "nodes"):
        profiled = serving_session(path, 1, workspace)
    for session in (profiled, serving_session(path, 1, workspace)):
        session.run(None, SOURCE)
        del session
    del profiled
    (written,) = tmp_path.glob("nodes*.json")
    assert "MatMul" in {event["args"].get("op_name") for event in json.loads(written.read_text()) if "args" in event}
