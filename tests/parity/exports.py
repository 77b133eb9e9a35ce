"""Small random models, exported once for a test session, and steppers for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import Bundle, Precision, load_bundle
from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, weights_of
from antiphon.export.bundle_model import NativeStepper
from antiphon.export.export import export_bundle
from antiphon.text.tokenizer import Tokenizer
from antiphon.transformer.random_model import random_transformer
from tests.kept_models import kept_model

# 256 bytes, the special tokens and a few merges.
VOCAB_SIZE = 272


def small_config(**overrides: object) -> ModelConfig:
    """Return a shape that uses every kernel path and is traced in seconds."""
    described: dict[str, object] = dict(
        vocab_size=VOCAB_SIZE, d_model=64, encoder_layers=2, decoder_layers=2, num_heads=4, d_ff=128, dropout=0.0,
        max_source_len=48, max_target_len=24,
    )  # fmt: skip
    return ModelConfig.model_validate({**described, **overrides})


def write_checkpoint(path: Path, config: ModelConfig) -> Checkpoint:
    """Write a random checkpoint with tokenizer."""
    texts = [f"the small word number {number} is here again" for number in range(50)]
    tokenizer = Tokenizer.train(texts, config.vocab_size)
    save_checkpoint(path, config=config, weights=weights_of(random_transformer(config)), tokenizer=tokenizer)
    return load_checkpoint(path)


def export_random(directory: Path, overrides: Mapping[str, object] | None = None, **options: Any) -> Bundle:
    """Export a random model, by default at every precision; the export itself compares the graphs with the model."""
    checkpoint = write_checkpoint(directory / "checkpoint", small_config(**(overrides or {})))
    return export_bundle(checkpoint, directory / "bundle", **options)


def shared_export(name: str, overrides: Mapping[str, object] | None = None, **options: Any) -> Bundle:
    """Return a random model that the first process to need it exports; nobody may change its files."""
    return load_bundle(kept_model(name, lambda folder: export_random(folder, overrides, **options)) / "bundle")


def native_stepper(bundle: Bundle, precision: Precision, *, threads: int = 1) -> NativeStepper:
    """Return a stepper for a native graph set of a bundle."""
    return NativeStepper(bundle.path, bundle.graph_set(precision, "native"), bundle.manifest.model, threads=threads)
