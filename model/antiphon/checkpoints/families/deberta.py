"""DeBERTa v1, v2 and v3 (He et al. 2021, 2023): BERT with disentangled attention.

v2 and v3 have logarithmic buckets of distances, and can share the projections of positions with those of the content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from antiphon.architecture.config import Disentangled, ModelConfig
from antiphon.checkpoints.families import encoder_only
from antiphon.checkpoints.families.encoder_only import BERT_MASKED_HEAD, EncoderNames, HeadNames
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import Settings, known_activation, refuse_unless, setting
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.errors import SourceError
from antiphon.transformer.layers import SelfAttention
from antiphon.transformer.transformer import Transformer

_TABLE = "encoder.rel_embeddings.weight"
# Names of the fill-mask head in the authors' checkpoints; those of transformers' class have BERT's.
_AUTHORS = HeadNames(
    task="fill_mask",
    transform="lm_predictions.lm_head.dense",
    norm="lm_predictions.lm_head.LayerNorm",
    output="lm_predictions.lm_head",
    output_biases=("lm_predictions.lm_head.bias",),
)


def _names(settings: Settings | None = None) -> EncoderNames:
    """Return the tensor names; the settings give the activation of the classifier's transform."""
    pooling = setting(settings or {}, "pooler_hidden_act", str, default="gelu")
    return EncoderNames(
        prefix="deberta.",
        ignored=("embeddings.position_ids", "embeddings.position_embeddings.weight", "mask_predictions.*"),
        heads=(
            _AUTHORS,
            BERT_MASKED_HEAD,
            HeadNames(
                task="classify",
                transform="pooler.dense",
                activation="tanh" if pooling == "tanh" else known_activation(pooling, "pooler_hidden_act"),
                output="classifier",
            ),
            HeadNames(task="tag", output="classifier"),
        ),
    )


def _resolve(settings: Settings, weights: SourceWeights) -> Settings:
    """Add to the settings what the tensors show, see encoder_only.resolve."""
    return encoder_only.resolve(settings, weights, _names(settings))


def _describe(settings: Settings, **choices: Any) -> ModelConfig:
    """Return BERT's shape with disentangled attention; only some checkpoints also have absolute positions."""
    refuse_unless(settings, "relative_attention", only=True, default=False)
    for name in ("embedding_size", "pooler_hidden_size"):
        refuse_unless(settings, name, only=setting(settings, "hidden_size", int), default=settings["hidden_size"])
    kinds = _kinds(settings)
    relative: dict[str, Any] = dict(content_to_position="c2p" in kinds, position_to_content="p2c" in kinds)
    absolute = setting(settings, "position_biased_input", bool, default=True)
    return encoder_only.configure(
        settings,
        _names(settings),
        **encoder_only.bert_fields({"layer_norm_eps": 1e-7, **settings}),
        positions="learned" if absolute else "none",
        disentangled=Disentangled(**relative | choices),
    )


def _max_distance(settings: Settings) -> int:
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


def _configure(settings: Settings) -> ModelConfig:
    """Return the shape: one table row for each distance, and separate projections for positions."""
    refuse_unless(settings, "talking_head", only=False, default=False)
    return _describe(settings, span=_max_distance(settings))


def _load(model: Transformer, weights: SourceWeights, settings: Settings) -> None:
    """Fill the model with the checkpoint's tensors."""
    encoder_only.load(model, weights, settings, _names(settings), _load_attention)
    _load_table(model, weights)


def _load_table(model: Transformer, weights: SourceWeights) -> None:
    """Fill the table of relative positions and its norm."""
    assert model.encoder is not None
    table = model.encoder.relative_positions
    assert table is not None
    weights.fill(table.weight, _TABLE)
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


def _configure_v2(settings: Settings) -> ModelConfig:
    """Return the shape of v1 with the additions of v2. The convolution of the largest v2 models is not supported."""
    refuse_unless(settings, "conv_kernel_size", only=0, default=0)
    longest, buckets = _max_distance(settings), setting(settings, "position_buckets", int, default=-1)
    norms = setting(settings, "norm_rel_ebd", str, default="none").lower().split("|")
    return _describe(
        settings,
        span=buckets if buckets > 0 else longest,
        max_distance=longest if buckets > 0 else None,
        share_projections=setting(settings, "share_att_key", bool, default=False),
        norm="layer_norm" in [norm.strip() for norm in norms],
    )


def _load_v2(model: Transformer, weights: SourceWeights, settings: Settings) -> None:
    """Fill the model with the checkpoint's tensors."""
    encoder_only.load(model, weights, settings, _names(settings), _load_attention_v2)
    _load_table(model, weights)


def _load_attention_v2(attention: SelfAttention, weights: SourceWeights, prefix: str) -> None:
    theirs = f"{prefix}.attention.self"
    weights.fill_module(attention.qkv, *(f"{theirs}.{part}_proj" for part in ("query", "key", "value")))
    assert attention.relative is not None
    if attention.relative.key is not None:
        weights.fill_module(attention.relative.key, f"{theirs}.pos_key_proj")
    if attention.relative.query is not None:
        weights.fill_module(attention.relative.query, f"{theirs}.pos_query_proj")


def _family(
    name: str,
    model_type: str,
    configure: Callable[[Settings], ModelConfig],
    load: Callable[[Transformer, SourceWeights, Settings], None],
) -> Family:
    return Family(
        name=name,
        model_types=(model_type,),
        configure=configure,
        resolve=_resolve,
        load=load,
        text=lambda folder, _, config: encoder_only.text(folder, config, "[MASK]"),
        reference="AutoModel",
    )


DEBERTA = _family("DeBERTa", "deberta", _configure, _load)
DEBERTA_V2 = _family("DeBERTa v2", "deberta-v2", _configure_v2, _load_v2)
