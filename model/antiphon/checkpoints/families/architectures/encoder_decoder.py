"""Common code of BART-like families: tensor names and settings of config.json.

Marian, BART, mBART, PEGASUS and M2M-100 have one architecture (Lewis et al. 2020, section 2) with different positions,
norm placements and activations. The family's file selects these.
"""

from __future__ import annotations

from typing import Any

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.settings import (
    Settings,
    activation,
    describe,
    is_tied,
    refuse_head,
    refuse_unequal,
    setting,
    token_id,
)
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.transformer.layers import DecoderLayer, EncoderLayer
from antiphon.transformer.transformer import Stack, Transformer

SHARED = "shared.weight"
OUTPUT = "lm_head.weight"
# A bias of minus infinity suppresses a token. This one does too, and stays a number in every precision.
_LEAST_BIAS = -1e4


def resolve_ties(settings: Settings, weights: SourceWeights) -> Settings:
    """Return the settings with tied embeddings as the tensors show: tied ones are stored once or are equal.

    transformers also ties equal tensors. config.json is often wrong here.
    """
    refuse_head(settings, ["ForConditionalGeneration"])
    weights.strip_prefix("model.")
    source, target = (weights.first_of(f"{side}.embed_tokens.weight", SHARED) for side in ("encoder", "decoder"))
    return {
        **settings,
        "share_encoder_decoder_embeddings": not weights.differ(source, target),
        "tie_word_embeddings": is_tied(settings, weights, target, OUTPUT),
    }


def common_fields(settings: Settings) -> dict[str, Any]:
    """Return the fields of ModelConfig for settings that have the same names in all these families."""
    refuse_unequal(settings, "encoder_attention_heads", "decoder_attention_heads")
    refuse_unequal(settings, "encoder_ffn_dim", "decoder_ffn_dim")
    longest = setting(settings, "max_position_embeddings", int)
    return dict(
        vocab_size=setting(settings, "vocab_size", int),
        d_model=setting(settings, "d_model", int),
        encoder_layers=setting(settings, "encoder_layers", int),
        decoder_layers=setting(settings, "decoder_layers", int),
        num_heads=setting(settings, "encoder_attention_heads", int),
        d_ff=setting(settings, "encoder_ffn_dim", int),
        activation=activation(settings, "activation_function"),
        scale_embeddings=setting(settings, "scale_embedding", bool, default=False),
        tie_source_target=setting(settings, "share_encoder_decoder_embeddings", bool, default=True),
        tie_output=setting(settings, "tie_word_embeddings", bool, default=True),
        dropout=setting(settings, "dropout", float, default=0.1),
        max_source_len=longest,
        max_target_len=longest,
    )


def special_ids(settings: Settings, *, pad: int | None, begin: int | None, eos: int, unk: int) -> dict[str, int]:
    """Return special token ids of config.json, or the family's defaults; `begin` is the first decoder input."""
    return dict(
        pad_id=token_id(settings, "pad_token_id", default=pad),
        bos_id=token_id(settings, "decoder_start_token_id", default=begin),
        eos_id=token_id(settings, "eos_token_id", default=eos),
        unk_id=unk,
    )


def configure(settings: Settings, **choices: Any) -> ModelConfig:
    """Return a ModelConfig from the common settings and a family's choices, which take precedence."""
    return describe(**{**common_fields(settings), **choices})


def load(model: Transformer, weights: SourceWeights, _: Settings) -> None:
    """Fill the model; tensor names are those of BartForConditionalGeneration, with or without the prefix `model.`."""
    assert model.encoder is not None
    assert model.decoder is not None
    config = model.config
    weights.strip_prefix("model.")
    source = ["encoder.embed_tokens.weight", SHARED]
    target = ["decoder.embed_tokens.weight", SHARED] + ([OUTPUT] if config.tie_output else [])
    if config.tie_source_target:
        target += source
    else:
        weights.fill_tied(model.encoder.embedding.weight, *source)
    weights.fill_tied(model.decoder.embedding.weight, *target)
    if not config.tie_output:
        weights.fill(model.output.weight, OUTPUT)
    if config.output_bias and "final_logits_bias" in weights:
        weights.fill(model.output.bias[None], "final_logits_bias")
        model.output.bias.data.clamp_(min=_LEAST_BIAS)
    weights.ignore("*coder.version")  # fairseq's version number in old files
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        _load_stack(stack, weights, name, config)


def _load_stack(stack: Stack, weights: SourceWeights, name: str, config: ModelConfig) -> None:
    positions = f"{name}.embed_positions.weight"
    assert stack.positions.table is not None
    if config.positions == "learned" or weights.has_rows(positions, stack.positions.table):
        # transformers reads stored sines and cosines, which are rounded in files of half precision.
        weights.fill_start(stack.positions.table, positions)
    else:
        weights.ignore(f"{positions}*")
    if config.embedding_norm:
        weights.fill_module(stack.embedding_norm, f"{name}.layernorm_embedding")
    if config.norm_placement == "pre":
        weights.fill_module(stack.final_norm, f"{name}.layer_norm")
    for index, layer in enumerate(stack.layers):
        assert isinstance(layer, EncoderLayer | DecoderLayer)
        _load_layer(layer, weights, f"{name}.layers.{index}")


def _load_layer(layer: EncoderLayer | DecoderLayer, weights: SourceWeights, name: str) -> None:
    attention, theirs = layer.self_attention, f"{name}.self_attn"
    weights.fill_module(attention.qkv, *(f"{theirs}.{part}_proj" for part in "qkv"))
    weights.fill_module(attention.out, f"{theirs}.out_proj")
    weights.fill_module(layer.self_residual.norm, f"{name}.self_attn_layer_norm")
    if isinstance(layer, DecoderLayer) and layer.cross_attention is not None and layer.cross_residual is not None:
        cross, theirs = layer.cross_attention, f"{name}.encoder_attn"
        weights.fill_module(cross.query, f"{theirs}.q_proj")
        weights.fill_module(cross.kv, f"{theirs}.k_proj", f"{theirs}.v_proj")
        weights.fill_module(cross.out, f"{theirs}.out_proj")
        weights.fill_module(layer.cross_residual.norm, f"{name}.encoder_attn_layer_norm")
    weights.fill_module(layer.feed_forward.inner, f"{name}.fc1")
    weights.fill_module(layer.feed_forward.outer, f"{name}.fc2")
    weights.fill_module(layer.feed_forward_residual.norm, f"{name}.final_layer_norm")
