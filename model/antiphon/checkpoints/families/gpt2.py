"""GPT-2 (Radford et al. 2019): decoder-only, with learned positions and pre-norm layers."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import (
    Settings,
    activation,
    describe,
    is_tied,
    refuse_head,
    refuse_unless,
    setting,
    token_id,
)
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.checkpoints.text_formats import tokenizers_format
from antiphon.text.format import TextFormat
from antiphon.transformer.layers import DecoderLayer
from antiphon.transformer.transformer import Transformer

_EMBEDDING, _OUTPUT = "wte.weight", "lm_head.weight"


def resolve(settings: Settings, weights: SourceWeights) -> Settings:
    """Return the settings with tie_word_embeddings as the tensors show."""
    refuse_head(settings, ["LMHeadModel", "ForCausalLM"])
    weights.strip_prefix("transformer.")
    return {**settings, "tie_word_embeddings": is_tied(settings, weights, _EMBEDDING, _OUTPUT)}


def configure(settings: Settings) -> ModelConfig:
    """Return the shape. Begin and end token are the same; there are no padding and unknown tokens."""
    for name, only in (("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False)):
        refuse_unless(settings, name, only=only, default=only)
    width = setting(settings, "n_embd", int)
    eos_id = token_id(settings, "eos_token_id", default=50256)
    return describe(
        architecture="decoder",
        vocab_size=setting(settings, "vocab_size", int),
        d_model=width,
        encoder_layers=0,
        decoder_layers=setting(settings, "n_layer", int),
        num_heads=setting(settings, "n_head", int),
        d_ff=setting(settings, "n_inner", int, default=4 * width),
        norm_placement="pre",
        norm_eps=setting(settings, "layer_norm_epsilon", float, default=1e-5),
        activation=activation(settings, "activation_function"),
        positions="learned",
        attention_scale=None if setting(settings, "scale_attn_weights", bool, default=True) else 1.0,
        scale_embeddings=False,
        tie_output=setting(settings, "tie_word_embeddings", bool, default=True),
        dropout=setting(settings, "resid_pdrop", float, default=0.1),
        max_target_len=setting(settings, "n_positions", int),
        pad_id=token_id(settings, "pad_token_id", default=eos_id),
        bos_id=token_id(settings, "bos_token_id", default=eos_id),
        eos_id=eos_id,
        unk_id=eos_id,
    )


def load(model: Transformer, weights: SourceWeights, _: Settings) -> None:
    """Fill the model; tensor names are those of GPT2LMHeadModel, with or without the prefix `transformer.`."""
    decoder = model.decoder
    assert decoder is not None
    assert decoder.positions.table is not None
    weights.strip_prefix("transformer.")
    weights.ignore("h.*.attn.bias")  # old files store the causal mask
    weights.ignore("h.*.attn.masked_bias")
    weights.fill_tied(decoder.embedding.weight, _EMBEDDING, *([_OUTPUT] if model.config.tie_output else []))
    if not model.config.tie_output:
        weights.fill(model.output.weight, _OUTPUT)
    weights.fill_start(decoder.positions.table, "wpe.weight")
    weights.fill_module(decoder.final_norm, "ln_f")
    for index, layer in enumerate(decoder.blocks):
        _load_layer(layer, weights, f"h.{index}")


def _load_layer(layer: DecoderLayer, weights: SourceWeights, name: str) -> None:
    weights.fill_module(layer.self_residual.norm, f"{name}.ln_1")
    _fill_transposed(layer.self_attention.qkv, weights, f"{name}.attn.c_attn")
    _fill_transposed(layer.self_attention.out, weights, f"{name}.attn.c_proj")
    weights.fill_module(layer.feed_forward_residual.norm, f"{name}.ln_2")
    _fill_transposed(layer.feed_forward.inner, weights, f"{name}.mlp.c_fc")
    _fill_transposed(layer.feed_forward.outer, weights, f"{name}.mlp.c_proj")


def _fill_transposed(ours: nn.Linear, weights: SourceWeights, name: str) -> None:
    """Fill a linear layer from a Conv1D of transformers, whose weight is [inputs, outputs]."""
    weights.fill(ours.weight.data.T, f"{name}.weight")  # a view, so the copy changes the parameter
    weights.fill(ours.bias, f"{name}.bias")


def text(folder: Path, settings: Settings, config: ModelConfig) -> TextFormat:
    """Return the text format of tokenizer.json: byte-level BPE, usually without tokens around a prompt."""
    return tokenizers_format(folder)


FAMILY = Family(
    name="GPT-2",
    model_types=("gpt2",),
    configure=configure,
    resolve=resolve,
    load=load,
    text=text,
    reference="AutoModelForCausalLM",
    input_first=("c_attn", "c_proj", "c_fc"),
)
