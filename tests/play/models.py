"""Small models with random weights for the page: one of each architecture that the shipped bundle does not have."""

from __future__ import annotations

import warnings
from pathlib import Path

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import Provenance
from antiphon.checkpoints.checkpoint import load_checkpoint, save_checkpoint, weights_of
from antiphon.export.export import export_bundle
from antiphon.text.tokenizer import MASK_TOKEN, Tokenizer, encoder_format
from antiphon.transformer.random_model import random_transformer
from tests.kept_models import kept_model

SHIPPED = Path(__file__).parents[2] / "model" / "antiphon" / "bundles" / "en-de"
VOCAB_SIZE = 280
_TEXTS = [f"the small cat number {number} sat on the red mat in Rome" for number in range(40)]
_SIZES = dict(
    d_model=32, num_heads=4, d_ff=64, dropout=0.0, max_source_len=64, max_target_len=64, vocab_size=VOCAB_SIZE
)
_LABELS = ("O", "B-animal", "I-animal", "B-place")
ENCODER = ModelConfig.model_validate(
    dict(
        _SIZES, architecture="encoder", encoder_layers=2, decoder_layers=0, positions="learned", token_types=2,
        heads=[
            dict(task="fill_mask", transform_width=32, activation="gelu", norm=True, tied=True),
            dict(task="classify", labels=("low", "middle", "high")),
            dict(task="tag", labels=_LABELS),
            dict(task="next_sentence", labels=("is_next", "not_next")),
        ],
    )
)  # fmt: skip
DECODER = ModelConfig.model_validate(
    dict(_SIZES, architecture="decoder", encoder_layers=0, decoder_layers=2, positions="rope")
)

# Its greedy answers have thousands of tokens, so that a request is still running when a test looks at it.
LONG = ModelConfig.model_validate(
    dict(_SIZES, encoder_layers=1, decoder_layers=1) | dict(d_model=16, d_ff=16, max_target_len=8192)
)


def write_bundle(name: str, config: ModelConfig) -> Path:
    """Export a model with random weights and return its bundle. Equal names have equal configurations."""
    return kept_model(f"play-{name}", lambda folder: _export(folder, config)) / "bundle"


def _export(folder: Path, config: ModelConfig) -> None:
    tokenizer = Tokenizer.train(_TEXTS, config.vocab_size, extra_special=[MASK_TOKEN] if config.heads else [])
    save_checkpoint(
        folder / "checkpoint",
        config=config,
        weights=weights_of(random_transformer(config)),
        tokenizer=tokenizer,
        text=encoder_format(tokenizer) if config.heads else None,
        provenance=Provenance(source="random", licence="CC0-1.0", attribution="nobody"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        export_bundle(load_checkpoint(folder / "checkpoint"), folder / "bundle", precisions=("float32",))


def served_bundles() -> dict[str, Path]:
    """Return a bundle of each architecture by its name for requests; the shipped one is the first."""
    models = {"bert": ENCODER, "gpt": DECODER}
    written = {name: write_bundle(name, config) for name, config in models.items()}
    return {"en-de": SHIPPED, **written}
