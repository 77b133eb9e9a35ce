"""T5 (Raffel et al. 2020), T5 1.1, FLAN-T5, mT5 and ByT5: relative positions, RMSNorm, no biases.

A checkpoint of the encoder alone (T5EncoderModel, such as GTR and Sentence-T5) becomes an encoder-only model.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.families.encoder_decoder import OUTPUT, SHARED, special_ids
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import Settings, activation, describe, is_tied, read_json, refuse_head, setting
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.checkpoints.text_formats import bytes_format, tokenizers_format
from antiphon.text.format import TextFormat
from antiphon.transformer.layers import DecoderLayer, EncoderLayer, self_attention_of
from antiphon.transformer.transformer import Stack, Transformer

_UNKNOWN_ID = 2
_HEADS = ("ForConditionalGeneration", "WithLMHeadModel")
# Relative positions have no maximum, so these are the maximum lengths of a bundle unless the importer's options differ.
_SOURCE_LEN, _TARGET_LEN = 1024, 512


def resolve(settings: Settings, weights: SourceWeights) -> Settings:
    """Return the settings with tie_word_embeddings as the tensors show, scale_decoder_outputs and is_encoder_decoder.

    In config.json of T5 1.1 and later models `tie_word_embeddings: false` means that the output is not scaled; newer
    versions of transformers write `scale_decoder_outputs` for that. transformers never scales the output of mT5.
    """
    refuse_head(settings, _HEADS)
    if _is_encoder(settings, weights):
        name = "T5EncoderModel" if settings.get("model_type") == "t5" else "MT5EncoderModel"
        return {**settings, "architectures": [name], "is_encoder_decoder": False}
    scales = setting(settings, "tie_word_embeddings", bool, default=True)
    if settings.get("model_type") == "t5":
        scales = setting(settings, "scale_decoder_outputs", bool, default=scales)
    else:
        scales = False
    embedding = weights.first_of(SHARED, "decoder.embed_tokens.weight")
    tied = is_tied(settings, weights, embedding, OUTPUT)
    return {**settings, "scale_decoder_outputs": scales, "tie_word_embeddings": tied, "is_encoder_decoder": True}


def _is_encoder(settings: Settings, weights: SourceWeights) -> bool:
    """Return whether a checkpoint is an encoder alone: its class is one, or it names no class and has no decoder."""
    architecture = str((settings.get("architectures") or [""])[0])
    if architecture.endswith(("EncoderModel", *_HEADS)):
        return architecture.endswith("EncoderModel")
    return not any(name.startswith("decoder.") for name in weights.names)


def configure(settings: Settings) -> ModelConfig:
    """Return the shape: no scaling of scores and embeddings, and a separate setting for the head width.

    transformers divides feed_forward_proj, such as gated-gelu, into dense_act_fn and is_gated_act.
    """
    layers = setting(settings, "num_layers", int)
    is_pair = setting(settings, "is_encoder_decoder", bool, default=True)
    return describe(
        architecture="encoder-decoder" if is_pair else "encoder",
        vocab_size=setting(settings, "vocab_size", int),
        d_model=setting(settings, "d_model", int),
        encoder_layers=layers,
        decoder_layers=setting(settings, "num_decoder_layers", int, default=layers) if is_pair else 0,
        num_heads=setting(settings, "num_heads", int),
        head_dim=setting(settings, "d_kv", int),
        d_ff=setting(settings, "d_ff", int),
        norm="rmsnorm",
        norm_placement="pre",
        norm_eps=setting(settings, "layer_norm_epsilon", float, default=1e-6),
        activation=activation(settings, "dense_act_fn"),
        gated=setting(settings, "is_gated_act", bool),
        positions="t5_relative",
        relative_buckets=setting(settings, "relative_attention_num_buckets", int, default=32),
        relative_max_distance=setting(settings, "relative_attention_max_distance", int, default=128),
        attention_scale=1.0,
        bias=False,
        scale_embeddings=False,
        tie_output=setting(settings, "tie_word_embeddings", bool, default=True),
        dropout=setting(settings, "dropout_rate", float, default=0.1),
        max_source_len=_SOURCE_LEN,
        max_target_len=_TARGET_LEN,
        **special_ids(settings, pad=0, begin=0, eos=1, unk=_UNKNOWN_ID),
    )


def load(model: Transformer, weights: SourceWeights, settings: Settings) -> None:
    """Fill the model. The factor d_model ** -0.5 of a scaled output is multiplied into the final norm."""
    assert model.encoder is not None
    if model.decoder is None:
        weights.fill_tied(model.encoder.embedding.weight, SHARED, "encoder.embed_tokens.weight")
        for pattern in ("decoder.*", OUTPUT):
            weights.ignore(pattern)
        _load_stack(model.encoder, weights, "encoder")
        return
    names = (SHARED, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    weights.fill_tied(model.decoder.embedding.weight, *names, *((OUTPUT,) if model.config.tie_output else ()))
    if not model.config.tie_output:
        weights.fill(model.output.weight, OUTPUT)
    weights.ignore("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight")  # unused, in old files
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        _load_stack(stack, weights, name)
    if settings["scale_decoder_outputs"]:
        assert isinstance(model.decoder.final_norm, nn.RMSNorm)
        with torch.no_grad():
            model.decoder.final_norm.weight.mul_(model.config.d_model**-0.5)


def _load_stack(stack: Stack, weights: SourceWeights, name: str) -> None:
    bias = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    weights.fill(stack.relative_bias.weight, bias)
    weights.fill_module(stack.final_norm, f"{name}.final_layer_norm")
    for index, layer in enumerate(stack.layers):
        assert isinstance(layer, EncoderLayer | DecoderLayer)
        _load_layer(layer, weights, f"{name}.block.{index}.layer")


def _load_layer(layer: EncoderLayer | DecoderLayer, weights: SourceWeights, name: str) -> None:
    attention = self_attention_of(layer)
    theirs = f"{name}.0.SelfAttention"
    weights.fill_module(attention.qkv, *(f"{theirs}.{part}" for part in "qkv"))
    weights.fill_module(attention.out, f"{theirs}.o")
    weights.fill_module(layer.self_residual.norm, f"{name}.0.layer_norm")
    last = 1
    if isinstance(layer, DecoderLayer) and layer.cross_attention is not None and layer.cross_residual is not None:
        theirs, last = f"{name}.1.EncDecAttention", 2
        weights.fill_module(layer.cross_attention.query, f"{theirs}.q")
        weights.fill_module(layer.cross_attention.kv, f"{theirs}.k", f"{theirs}.v")
        weights.fill_module(layer.cross_attention.out, f"{theirs}.o")
        weights.fill_module(layer.cross_residual.norm, f"{name}.1.layer_norm")
    theirs = f"{name}.{last}.DenseReluDense"
    inner = ("wi_0", "wi_1") if layer.feed_forward.gated else ("wi",)
    weights.fill_module(layer.feed_forward.inner, *(f"{theirs}.{part}" for part in inner))
    weights.fill_module(layer.feed_forward.outer, f"{theirs}.wo")
    weights.fill_module(layer.feed_forward_residual.norm, f"{name}.{last}.layer_norm")


def text(folder: Path, settings: Settings, _: ModelConfig) -> TextFormat:
    """Return the text format of tokenizer.json. ByT5's tokens are bytes, after padding, end and unknown token."""
    described = read_json(folder / "tokenizer_config.json")
    if "ByT5" in str(described.get("tokenizer_class", settings.get("tokenizer_class", ""))):
        return bytes_format(folder)
    return tokenizers_format(folder)


T5 = Family(
    name="T5",
    model_types=("t5", "mt5"),
    configure=configure,
    resolve=resolve,
    load=load,
    text=text,
    reference="AutoModelForSeq2SeqLM",
)
