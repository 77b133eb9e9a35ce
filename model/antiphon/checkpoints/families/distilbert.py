"""DistilBERT (Sanh et al. 2019)."""

from __future__ import annotations

from functools import partial

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families.architectures import encoder_only
from antiphon.checkpoints.families.architectures.encoder_only import EncoderNames, HeadNames
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import Settings, activation, setting

_NAMES = EncoderNames(
    prefix="distilbert.",
    layer="transformer.layer.{index}",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    inner="ffn.lin1",
    outer="ffn.lin2",
    norm="output_layer_norm",
    heads=(
        HeadNames(task="fill_mask", transform="vocab_transform", norm="vocab_layer_norm", output="vocab_projector"),
        HeadNames(task="classify", transform="pre_classifier", activation="relu", output="classifier"),
        HeadNames(task="tag", output="classifier"),
    ),
)


def configure(settings: Settings) -> ModelConfig:
    """Return BERT's shape without token types and pooler. Sinusoidal positions are stored like learned ones."""
    return encoder_only.configure(
        settings,
        _NAMES,
        vocab_size=setting(settings, "vocab_size", int),
        d_model=setting(settings, "dim", int),
        encoder_layers=setting(settings, "n_layers", int),
        num_heads=setting(settings, "n_heads", int),
        d_ff=setting(settings, "hidden_dim", int),
        activation=activation(settings, "activation"),
        norm_eps=1e-12,
        dropout=setting(settings, "dropout", float, default=0.1),
    )


FAMILY = Family(
    name="DistilBERT",
    model_types=("distilbert",),
    configure=configure,
    resolve=partial(encoder_only.resolve, names=_NAMES),
    load=partial(encoder_only.load, names=_NAMES),
    text=lambda folder, settings, config: encoder_only.text(folder, config, "[MASK]"),
    reference="AutoModel",
)
