"""DeBERTa v2 and v3 (He et al. 2021, 2023): logarithmic buckets of distances, projections shared with the content."""

from __future__ import annotations

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families import deberta
from antiphon.checkpoints.families.architectures import encoder_only
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import Settings, refuse_unless, setting
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.transformer.layers import SelfAttention
from antiphon.transformer.transformer import Transformer


def configure(settings: Settings) -> ModelConfig:
    """Return the shape of v1 with the additions of v2. The convolution of the largest v2 models is not supported."""
    refuse_unless(settings, "conv_kernel_size", only=0, default=0)
    longest, buckets = deberta.max_distance(settings), setting(settings, "position_buckets", int, default=-1)
    norms = setting(settings, "norm_rel_ebd", str, default="none").lower().split("|")
    return deberta.describe(
        settings,
        span=buckets if buckets > 0 else longest,
        max_distance=longest if buckets > 0 else None,
        share_projections=setting(settings, "share_att_key", bool, default=False),
        norm="layer_norm" in [norm.strip() for norm in norms],
    )


def load(model: Transformer, weights: SourceWeights, settings: Settings) -> None:
    """Fill the model with the checkpoint's tensors."""
    encoder_only.load(model, weights, settings, deberta.names(settings), _load_attention)
    deberta.load_table(model, weights)


def _load_attention(attention: SelfAttention, weights: SourceWeights, prefix: str) -> None:
    theirs = f"{prefix}.attention.self"
    weights.fill_module(attention.qkv, *(f"{theirs}.{part}_proj" for part in ("query", "key", "value")))
    assert attention.relative is not None
    if attention.relative.key is not None:
        weights.fill_module(attention.relative.key, f"{theirs}.pos_key_proj")
    if attention.relative.query is not None:
        weights.fill_module(attention.relative.query, f"{theirs}.pos_query_proj")


FAMILY = Family(
    name="DeBERTa v2",
    model_types=("deberta-v2",),
    configure=configure,
    resolve=deberta.resolve,
    load=load,
    text=lambda folder, settings, config: encoder_only.text(folder, config, "[MASK]"),
    reference="AutoModel",
)
