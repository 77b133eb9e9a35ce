"""Bundles with 4-bit weights. test_native_nibbles.py tests the operator that reads them."""

from __future__ import annotations

from pathlib import Path

from antiphon.export.export import export_bundle
from antiphon.export.verify import verify
from antiphon.transformer.random_model import random_transformer
from tests.parity.conftest import VARIANTS
from tests.parity.exports import small_config, write_checkpoint


def test_int4_graphs_agree_with_pytorch_and_are_smaller(tmp_path: Path) -> None:
    """The loss of 4 bits is largest for T5's unscaled scores; the other variants lose a third of it."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", small_config(**VARIANTS["t5"]))
    nibbles = export_bundle(checkpoint, tmp_path / "bundle", precisions=("int8", "int4"), explain=False)
    graphs = nibbles.graph_set("int4")
    verify(nibbles.path, graphs, random_transformer(nibbles.manifest.model), seed=7)
    sizes = {name: nibbles.manifest.files[f"weights.native.{name}.bin"].size for name in ("int8", "int4")}
    assert sizes["int4"] < 0.8 * sizes["int8"]
    assert (graphs.cache, graphs.explain) == ("float16", None)
    assert nibbles.graph_set().precision == "int8"
