"""Bundles with random weights that the GPU benchmark measures: speed depends on shapes, not on what a model knows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from antiphon.architecture.config import ModelConfig, preset
from antiphon.bundle.manifest import MANIFEST_NAME, Bundle, Lowering, Precision, load_bundle
from antiphon.checkpoints.checkpoint import load_checkpoint, save_checkpoint, weights_of
from antiphon.export.export import add_metadata, write_graphs
from antiphon.tools.bench.make_models import pair_tokenizer, random_model

BART_LARGE: dict[str, object] = dict(
    vocab_size=50265, d_model=1024, encoder_layers=12, decoder_layers=12, num_heads=16, d_ff=4096, activation="gelu",
    positions="learned", positions_offset=2, scale_embeddings=False, embedding_norm=True, max_source_len=1024,
    max_target_len=256,
)  # fmt: skip
"""Shape of facebook/bart-large (Lewis et al. 2020): 406 million weights."""
SHAPES = ("bart-large", "base", "big", "tiny")


def shape_of(name: str) -> ModelConfig:
    """Return `bart-large`, or a preset of the paper; `tiny` with heads and a vocabulary large enough."""
    if name == "bart-large":
        return ModelConfig.model_validate(BART_LARGE)
    return preset(name, **(dict(num_heads=2, vocab_size=320) if name == "tiny" else {}))


def random_bundle(name: str, precisions: Sequence[Precision], lowerings: Sequence[Lowering], folder: Path) -> Bundle:
    """Write a bundle of a shape whose greedy targets never end. Its graphs are not compared with the model."""
    config, checkpoint, bundle = shape_of(name), folder / "checkpoint", folder / "bundle"
    bundle.mkdir(parents=True)
    tokenizer = pair_tokenizer(config.vocab_size)
    save_checkpoint(checkpoint, config=config, weights=weights_of(random_model(config)), tokenizer=tokenizer)
    loaded = load_checkpoint(checkpoint)
    graphs = write_graphs(loaded.model, bundle, precisions, lowerings)
    add_metadata(loaded, bundle, graphs, f"random-{name}")
    return load_bundle(bundle)


def kept_bundle(folder: Path) -> Bundle | None:
    """Return the bundle that `random_bundle` wrote to this folder before, or None."""
    bundle = folder / "bundle"
    return load_bundle(bundle) if (bundle / MANIFEST_NAME).is_file() else None


def step_weight_bytes(config: ModelConfig) -> int:
    """Return the bytes of bfloat16 weights that one decoder step reads: its products, and that over the vocabulary.

    For ungated models whose heads together are as wide as the states. Keys and values of sources are computed once by
    the encoder's pass, so the products of cross attention are those of queries and outputs.
    """
    attention, feed_forward = (4 + 2) * config.d_model**2, 2 * config.d_model * config.d_ff
    return 2 * (config.decoder_layers * (attention + feed_forward) + config.vocab_size * config.d_model)
