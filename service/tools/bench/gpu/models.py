"""Bundles with random weights that the GPU benchmark measures: speed depends on shapes, not on what a model knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from antiphon.model.bundle.manifest import Bundle, Lowering, Manifest, Precision
from antiphon.model.config import ModelConfig, preset
from antiphon.model.export.export import write_graphs
from antiphon.model.text.format import TextFormat
from antiphon.model.transformer.random_model import random_transformer

BART_LARGE: dict[str, object] = dict(
    vocab_size=50265, d_model=1024, encoder_layers=12, decoder_layers=12, num_heads=16, d_ff=4096, activation="gelu",
    positions="learned", positions_offset=2, scale_embeddings=False, embedding_norm=True, max_source_len=1024,
    max_target_len=256,
)  # fmt: skip
"""Shape of facebook/bart-large (Lewis et al. 2020): 406 million weights."""
SHAPES = ("bart-large", "base", "big", "tiny")


def shape_of(name: str) -> ModelConfig:
    """Return `bart-large`, or a preset of the paper; `tiny` with heads wide enough for the kernels."""
    if name == "bart-large":
        return ModelConfig.model_validate(BART_LARGE)
    return preset(name, **(dict(num_heads=2) if name == "tiny" else {}))


def random_bundle(name: str, precisions: Sequence[Precision], lowerings: Sequence[Lowering], folder: Path) -> Bundle:
    """Write the graphs of a random model of a shape into an empty folder; it has no tokenizer. Verifies nothing."""
    model = random_transformer(shape_of(name))
    graphs = write_graphs(model, folder, precisions, lowerings)
    manifest = Manifest(
        name=f"random-{name}",
        model=model.config,
        text=TextFormat(template=("$text",)),
        graphs=tuple(graphs),
        files={},
    )
    return Bundle(path=folder, manifest=manifest)
