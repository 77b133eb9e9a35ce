"""T5Gemma (Zhang et al. 2025): encoder and decoder of Gemma 2, with cross-attention as a sublayer of its own.

Gemma 2 (Gemma Team 2024) has rotary positions, grouped keys, norms before and after each sublayer, and limits of scores
and logits. Its norms multiply by 1 + weight, which is added here. Layers with a sliding window are served within the
window, where they read the same tokens as the others. T5Gemma 2 is another model: its decoder has one softmax over the
tokens before and the source together, for which there is no operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families.decoder_only import (
    fill_or_zero,
    fill_repeated,
    parts_of,
    rotation_of,
    scaling_of,
)
from antiphon.checkpoints.families.encoder_decoder import special_ids
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import Settings, activation, describe, is_tied, refuse_head, setting
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.errors import SourceError
from antiphon.transformer.layers import CrossAttention, DecoderLayer, EncoderLayer, Residual, SelfAttention
from antiphon.transformer.transformer import Stack, Transformer

_SOURCE, _TARGET, _OUTPUT = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.out_proj.weight"
# Settings of the two parts for which our model has one field.
_SHARED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "head_dim",
    "hidden_activation",
    "rms_norm_eps",
    "rope_parameters",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
)
_MAX_LEN = 65536  # maximum of ModelConfig


def _part(settings: Settings, name: str) -> dict[str, Any]:
    part = settings.get(name)
    if not isinstance(part, dict):
        raise SourceError(f"config.json: {name} is {part!r}, expected an object")
    return part


def resolve(settings: Settings, weights: SourceWeights) -> Settings:
    """Return the settings with tie_word_embeddings, share_embeddings and has_bias as the tensors show."""
    refuse_head(settings, ["ForConditionalGeneration"])
    weights.strip_prefix("model.")
    return {
        **settings,
        "tie_word_embeddings": is_tied(settings, weights, _TARGET, _OUTPUT),
        "share_embeddings": not weights.differ(_SOURCE, _TARGET),
        "has_bias": any(name.endswith("_proj.bias") for name in weights.names),
    }


def configure(settings: Settings) -> ModelConfig:
    """Return the shape. Raises SourceError naming a setting in which encoder and decoder differ."""
    encoder, decoder = _part(settings, "encoder"), _part(settings, "decoder")
    for name in _SHARED:
        if encoder.get(name) != decoder.get(name):
            raise SourceError(
                f"config.json: encoder.{name} is {encoder.get(name)!r} and decoder.{name} is {decoder.get(name)!r}; "
                "only equal values are supported"
            )
    rotation = rotation_of(decoder)
    return describe(
        vocab_size=setting(decoder, "vocab_size", int),
        source_vocab_size=setting(encoder, "vocab_size", int),
        d_model=setting(decoder, "hidden_size", int),
        encoder_layers=setting(encoder, "num_hidden_layers", int),
        decoder_layers=setting(decoder, "num_hidden_layers", int),
        num_heads=setting(decoder, "num_attention_heads", int),
        head_dim=setting(decoder, "head_dim", int),
        d_ff=setting(decoder, "intermediate_size", int),
        norm="rmsnorm",
        norm_placement="pre",
        post_norms=True,
        norm_eps=setting(decoder, "rms_norm_eps", float),
        activation=activation(decoder, "hidden_activation"),
        gated=True,
        positions="rope",
        rope_theta=rotation["rope_theta"],
        rope_scaling=scaling_of(decoder, rotation),
        attention_scale=setting(decoder, "query_pre_attn_scalar", float) ** -0.5,
        attention_cap=decoder.get("attn_logit_softcapping"),
        output_cap=decoder.get("final_logit_softcapping"),
        tie_source_target=setting(settings, "share_embeddings", bool, default=False),
        tie_output=setting(settings, "tie_word_embeddings", bool, default=True),
        bias=setting(settings, "has_bias", bool, default=False),
        dropout=setting(settings, "dropout_rate", float, default=0.0),
        max_source_len=_longest(encoder),
        max_target_len=_longest(decoder),
        **special_ids({**settings, "vocab_size": decoder["vocab_size"]}, pad=0, begin=2, eos=1, unk=3),
    )


def _longest(part: Settings) -> int:
    """Return the maximum length, in which a token is within the window of every other one."""
    longest = setting(part, "max_position_embeddings", int)
    window = setting(part, "sliding_window", int, default=longest)
    return min(longest, window if "sliding_attention" in (part.get("layer_types") or ()) else longest, _MAX_LEN)


def load(model: Transformer, weights: SourceWeights, settings: Settings) -> None:
    """Fill the model; tensor names are those of T5GemmaForConditionalGeneration."""
    assert model.encoder is not None
    assert model.decoder is not None
    config = model.config
    weights.strip_prefix("model.")
    target = [_TARGET, *([_OUTPUT] if config.tie_output else []), *([_SOURCE] if config.tie_source_target else [])]
    weights.fill_tied(model.decoder.embedding.weight, *target)
    if not config.tie_source_target:
        weights.fill(model.encoder.embedding.weight, _SOURCE)
    if not config.tie_output:
        weights.fill(model.output.weight, _OUTPUT)
    stacks: tuple[tuple[str, Stack], ...] = (("encoder", model.encoder), ("decoder", model.decoder))
    for name, stack in stacks:
        key_heads = setting(_part(settings, name), "num_key_value_heads", int)
        if config.num_heads % key_heads:
            raise SourceError(
                f"config.json: {name}.num_key_value_heads is {key_heads}, which does not divide "
                f"num_attention_heads, {config.num_heads}"
            )
        _load_norm(stack.final_norm, weights, f"{name}.norm")
        for index, layer in enumerate(stack.layers):
            assert isinstance(layer, EncoderLayer | DecoderLayer)
            _load_layer(layer, weights, f"{name}.layers.{index}", key_heads)


def _load_layer(layer: EncoderLayer | DecoderLayer, weights: SourceWeights, name: str, key_heads: int) -> None:
    assert isinstance(layer.self_attention, SelfAttention)
    _load_residual(layer.self_residual, weights, name, "self_attn")
    _load_attention(layer.self_attention, weights, f"{name}.self_attn", key_heads)
    if isinstance(layer, DecoderLayer) and layer.cross_attention is not None and layer.cross_residual is not None:
        _load_residual(layer.cross_residual, weights, name, "cross_attn")
        _load_attention(layer.cross_attention, weights, f"{name}.cross_attn", key_heads)
    _load_residual(layer.feed_forward_residual, weights, name, "feedforward")
    for part, ours in parts_of(layer.feed_forward.inner):
        for theirs, target in zip(("gate", "up"), ours.chunk(2), strict=True):
            fill_or_zero(target, weights, f"{name}.mlp.{theirs}_proj.{part}")
    for part, ours in parts_of(layer.feed_forward.outer):
        fill_or_zero(ours, weights, f"{name}.mlp.down_proj.{part}")


def _load_attention(
    attention: SelfAttention | CrossAttention, weights: SourceWeights, name: str, key_heads: int
) -> None:
    """Fill the projections; one matrix has queries, keys and values, or keys and values of cross-attention."""
    targets: list[tuple[str, Tensor, Tensor]]  # a part, its queries, its keys and values
    if isinstance(attention, SelfAttention):
        width = attention.heads[0] * attention.heads[1]
        targets = [(part, ours[:width], ours[width:]) for part, ours in parts_of(attention.qkv)]
    else:
        pairs = zip(parts_of(attention.query), parts_of(attention.kv), strict=True)
        targets = [(part, query, ours) for (part, query), (_, ours) in pairs]
    for part, query, pair in targets:
        key, value = pair.chunk(2)
        fill_or_zero(query, weights, f"{name}.q_proj.{part}")
        fill_repeated(key, weights, f"{name}.k_proj.{part}", attention.heads, key_heads)
        fill_repeated(value, weights, f"{name}.v_proj.{part}", attention.heads, key_heads)
    for part, ours in parts_of(attention.out):
        fill_or_zero(ours, weights, f"{name}.o_proj.{part}")


def _load_residual(residual: Residual, weights: SourceWeights, layer: str, sublayer: str) -> None:
    assert residual.post is not None
    _load_norm(residual.norm, weights, f"{layer}.pre_{sublayer}_layernorm")
    _load_norm(residual.post, weights, f"{layer}.post_{sublayer}_layernorm")


@torch.no_grad()
def _load_norm(norm: nn.Module, weights: SourceWeights, name: str) -> None:
    weight = norm.get_parameter("weight")
    weights.fill(weight, f"{name}.weight")
    weight.add_(1.0)


T5GEMMA = Family(
    name="T5Gemma",
    model_types=("t5gemma",),
    configure=configure,
    resolve=resolve,
    load=load,
    reference="AutoModelForSeq2SeqLM",
)
