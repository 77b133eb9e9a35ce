"""DeBERTa (He et al. 2021): BERT with disentangled attention."""

from __future__ import annotations

from typing import Any

import torch

from antiphon.architecture.config import Disentangled, ModelConfig
from antiphon.checkpoints.families.architectures import encoder_only
from antiphon.checkpoints.families.architectures.encoder_only import EncoderNames, HeadNames
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import Settings, known_activation, refuse_unless, setting
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.errors import SourceError
from antiphon.transformer.layers import SelfAttention
from antiphon.transformer.transformer import Transformer

TABLE = "encoder.rel_embeddings.weight"
# Names of the fill-mask head in the authors' checkpoints, and in those of transformers' class.
_AUTHORS = HeadNames(
    task="fill_mask",
    transform="lm_predictions.lm_head.dense",
    norm="lm_predictions.lm_head.LayerNorm",
    output="lm_predictions.lm_head",
    output_biases=("lm_predictions.lm_head.bias",),
)
_LEGACY = HeadNames(
    task="fill_mask",
    transform="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    output="cls.predictions.decoder",
    output_biases=("cls.predictions.decoder.bias", "cls.predictions.bias"),
)


def names(settings: Settings | None = None) -> EncoderNames:
    """Return the tensor names; the settings give the activation of the classifier's transform."""
    pooling = setting(settings or {}, "pooler_hidden_act", str, default="gelu")
    return EncoderNames(
        prefix="deberta.",
        ignored=("embeddings.position_ids", "embeddings.position_embeddings.weight", "mask_predictions.*"),
        heads=(
            _AUTHORS,
            _LEGACY,
            HeadNames(
                task="classify",
                transform="pooler.dense",
                activation="tanh" if pooling == "tanh" else known_activation(pooling, "pooler_hidden_act"),
                output="classifier",
            ),
            HeadNames(task="tag", output="classifier"),
        ),
    )


def resolve(settings: Settings, weights: SourceWeights) -> Settings:
    """Add to the settings what the tensors show, see encoder_only.resolve."""
    return encoder_only.resolve(settings, weights, names(settings))


def describe(settings: Settings, **choices: Any) -> ModelConfig:
    """Return BERT's shape with disentangled attention; only some checkpoints also have absolute positions."""
    refuse_unless(settings, "relative_attention", only=True, default=False)
    for name in ("embedding_size", "pooler_hidden_size"):
        refuse_unless(settings, name, only=setting(settings, "hidden_size", int), default=settings["hidden_size"])
    kinds = _kinds(settings)
    relative: dict[str, Any] = dict(content_to_position="c2p" in kinds, position_to_content="p2c" in kinds)
    absolute = setting(settings, "position_biased_input", bool, default=True)
    return encoder_only.configure(
        settings,
        names(settings),
        **encoder_only.bert_fields({"layer_norm_eps": 1e-7, **settings}),
        positions="learned" if absolute else "none",
        disentangled=Disentangled(**relative | choices),
    )


def max_distance(settings: Settings) -> int:
    """Return the largest relative distance; the longest source if config.json has none or -1."""
    longest = setting(settings, "max_relative_positions", int, default=-1)
    return longest if longest >= 1 else setting(settings, "max_position_embeddings", int)


def _kinds(settings: Settings) -> list[str]:
    """Return the terms of a score beside content-to-content: "c2p", "p2c" or both."""
    named = settings.get("pos_att_type") or []
    kinds = [kind.strip() for kind in named.lower().split("|")] if isinstance(named, str) else list(named)
    if not kinds or not {*kinds} <= {"c2p", "p2c"}:
        raise SourceError(f"config.json: pos_att_type is {named!r}; c2p, p2c or both are supported")
    return kinds


def configure(settings: Settings) -> ModelConfig:
    """Return the shape: one table row for each distance, and separate projections for positions."""
    refuse_unless(settings, "talking_head", only=False, default=False)
    return describe(settings, span=max_distance(settings))


def load(model: Transformer, weights: SourceWeights, settings: Settings) -> None:
    """Fill the model with the checkpoint's tensors."""
    encoder_only.load(model, weights, settings, names(settings), _load_attention)
    load_table(model, weights)


def load_table(model: Transformer, weights: SourceWeights) -> None:
    """Fill the table of relative positions and its norm."""
    assert model.encoder is not None
    table = model.encoder.relative_positions
    assert table is not None
    weights.fill(table.weight, TABLE)
    if table.norm is not None:
        weights.fill_module(table.norm, "encoder.LayerNorm")


def _load_attention(attention: SelfAttention, weights: SourceWeights, prefix: str) -> None:
    """Fill one attention layer.

    The checkpoint's matrix stores query, key and value of each head together. Keys and position keys have no bias.
    """
    theirs = f"{prefix}.attention.self"
    heads, width = attention.heads
    parts = attention.qkv.weight.detach().view(3, heads, width, -1)
    weights.fill_view(parts.transpose(0, 1), f"{theirs}.in_proj.weight")
    query, key, value = attention.qkv.bias.detach().chunk(3)
    weights.fill(query, f"{theirs}.q_bias")
    key.zero_()
    weights.fill(value, f"{theirs}.v_bias")
    assert attention.relative is not None
    if attention.relative.key is not None:
        weights.fill(attention.relative.key.weight, f"{theirs}.pos_proj.weight")
        with torch.no_grad():
            attention.relative.key.bias.zero_()
    if attention.relative.query is not None:
        weights.fill_module(attention.relative.query, f"{theirs}.pos_q_proj")


FAMILY = Family(
    name="DeBERTa",
    model_types=("deberta",),
    configure=configure,
    resolve=resolve,
    load=load,
    text=lambda folder, _, config: encoder_only.text(folder, config, "[MASK]"),
    reference="AutoModel",
)
