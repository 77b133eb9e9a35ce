"""Decoders alone: exported graphs against PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.model.bundle import Bundle
from antiphon.model.export import ExportError, export_bundle
from antiphon.model.random_model import random_transformer
from antiphon.model.verify import verify
from tests.parity.exports import export_random, small_config, write_checkpoint

DECODERS: dict[str, dict[str, object]] = {
    "gpt2": dict(positions="learned", activation="gelu_tanh", norm_placement="pre", scale_embeddings=False),
    "llama": dict(
        positions="rope", norm="rmsnorm", norm_placement="pre", activation="silu", gated=True, bias=False,
        tie_output=False, scale_embeddings=False, head_dim=24,
    ),
}  # fmt: skip
ALONE: dict[str, object] = dict(architecture="decoder", encoder_layers=0)


@pytest.fixture(scope="module", params=list(DECODERS))
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return export_random(tmp_path_factory.mktemp(request.param), ("native",), ALONE | DECODERS[request.param])


def test_decoder_alone_is_exported_without_encoder_and_agrees_with_pytorch(bundle: Bundle) -> None:
    for graphs in bundle.manifest.graphs:
        assert (graphs.encoder, graphs.explain) == (None, None)
        verify(bundle.path, graphs, random_transformer(bundle.manifest.model), seed=7)


@pytest.mark.parametrize("lowering", ["contrib", "eager"])
def test_decoder_alone_is_refused_by_other_lowerings(tmp_path: Path, lowering: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", small_config(**ALONE, **DECODERS["gpt2"]))
    with pytest.raises(ExportError, match=f"lowering='{lowering}' does not fit architecture='decoder'"):
        export_bundle(checkpoint, tmp_path / "bundle", lowerings=("native", lowering))  # type: ignore[arg-type]
    assert not (tmp_path / "bundle").exists()
