"""A bundle without native graphs, given to the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.cli.main import main
from tests.unit.graphs.tiny_graphs import tiny_config, tiny_model, write_bundle


def test_serve_refuses_a_bundle_without_native_graphs_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = write_bundle(tmp_path / "contrib", tiny_model(tiny_config()), ("contrib", "eager"))
    assert main(["serve", str(bundle.path), "--port=0", "--metrics-port=0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"antiphon serve: {bundle.path / 'manifest.json'}: no native graphs; the bundle holds contrib-float32, "
        "eager-float32; export the model again"
    )
