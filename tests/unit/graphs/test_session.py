"""Sessions of every kind: equal results, and the files of a profile."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from antiphon.bundle.manifest import Bundle
from antiphon.bundle.session import native_session, profiling, serving_session
from antiphon.export.profile import encoder_inputs
from antiphon.ops.workspace import Workspace
from tests.parity.exports import small_config
from tests.unit.graphs.conftest import TINY

SOURCE = encoder_inputs(small_config(**TINY), "float32", rows=2, length=5)


def test_serving_and_native_sessions_are_bit_identical(bundle: Bundle) -> None:
    path = bundle.file(bundle.graph_set().encoder_file)
    served, plain = serving_session(path, Workspace(is_own=True)), native_session(path)
    for found, expected in zip(served.run(None, SOURCE), plain.run(None, SOURCE), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_serving_session_writes_a_profile_only_when_it_was_opened_with_one(bundle: Bundle, tmp_path: Path) -> None:
    path = bundle.file(bundle.graph_set().encoder_file)
    workspace = Workspace(is_own=True)
    with profiling(tmp_path / "nodes"):
        profiled = serving_session(path, workspace)
    for session in (profiled, serving_session(path, workspace)):
        session.run(None, SOURCE)
        del session
    del profiled
    (written,) = tmp_path.glob("nodes*.json")
    assert "PackedAttentionSublayer" in {
        event["args"].get("op_name") for event in json.loads(written.read_text()) if "args" in event
    }
