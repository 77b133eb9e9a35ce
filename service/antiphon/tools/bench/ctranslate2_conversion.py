"""Conversion of a checkpoint to a CTranslate2 model with the same weights: the live reference for quality and speed.

The tokens of the converted model are token ids in decimal, so that both engines are compared on ids alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from ctranslate2.specs import common_spec, transformer_spec
from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.errors import CheckpointError
from antiphon.tools.bench.ctranslate2 import ACTIVATIONS, obstacle
from antiphon.transformer.layers import CrossAttention, DecoderLayer, EncoderLayer, FeedForward, SelfAttention


def save_ctranslate2_model(checkpoint: Checkpoint, folder: Path, *, quantization: str | None = None) -> None:
    """Write a CTranslate2 model directory. quantization: None keeps float32; "int8" uses CTranslate2's quantisation.

    Raises CheckpointError, which names field and values, for a model that cannot be converted (see `obstacle`).
    """
    spec = ctranslate2_specification(checkpoint)
    spec.validate()
    spec.optimize(quantization=quantization)
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))


def ctranslate2_specification(checkpoint: Checkpoint) -> transformer_spec.TransformerSpec:
    """Return the CTranslate2 model before validation, quantisation and writing.

    Raises CheckpointError as `save_ctranslate2_model` does.
    """
    config = checkpoint.config
    if (reason := obstacle(config)) is not None:
        raise CheckpointError(reason)
    spec = _empty_specification(config)
    _fill(spec, checkpoint)
    spec.register_source_vocabulary([str(index) for index in range(config.resolved_source_vocab_size)])
    spec.register_target_vocabulary([str(index) for index in range(config.vocab_size)])
    spec.config.bos_token = spec.config.decoder_start_token = str(config.bos_id)
    spec.config.eos_token = str(config.eos_id)
    spec.config.unk_token = str(config.unk_id)
    spec.config.layer_norm_epsilon = config.norm_eps
    return spec


def translate(
    translator: ctranslate2.Translator, sources: Sequence[Sequence[int]], **options: object
) -> list[list[int]]:
    """Translate sources (end token included) with CTranslate2 and return target ids; greedy by default."""
    settings: dict[str, Any] = {"beam_size": 1, "max_batch_size": 32, **options}
    results = translator.translate_batch([[str(i) for i in source] for source in sources], **settings)
    return [[int(token) for token in result.hypotheses[0]] for result in results]


def _empty_specification(config: ModelConfig) -> transformer_spec.TransformerSpec:
    shape = {
        "pre_norm": config.norm_placement == "pre",
        "activation": getattr(common_spec.Activation, ACTIVATIONS[config.activation]),
        "layernorm_embedding": config.embedding_norm,
        "relative_attention_bias": config.positions == "t5_relative",
        "ffn_glu": config.gated,
        "rms_norm": config.norm == "rmsnorm",
    }
    if config.positions == "rope":
        shape |= {
            "rotary_dim": config.resolved_head_dim,
            "rotary_interleave": False,
            "rotary_base": config.rope_theta,
        }
    encoder = transformer_spec.TransformerEncoderSpec(config.encoder_layers, config.num_heads, **shape)
    decoder = transformer_spec.TransformerDecoderSpec(config.decoder_layers, config.num_heads, **shape)
    return transformer_spec.TransformerSpec(encoder, decoder)


def _fill(spec: Any, checkpoint: Checkpoint) -> None:
    config, model = checkpoint.config, checkpoint.model
    assert model.encoder is not None
    assert model.decoder is not None
    for side, stack in ((spec.encoder, model.encoder), (spec.decoder, model.decoder)):
        embeddings = side.embeddings[0] if isinstance(side.embeddings, list) else side.embeddings
        embeddings.weight = _array(stack.embedding.weight)
        side.scale_embeddings = config.scale_embeddings
        if (vectors := stack.positions.vectors) is not None:
            side.position_encodings.encodings = _array(vectors)
        if config.embedding_norm:
            _fill_norm(side.layernorm_embedding, stack.embedding_norm)
        if config.norm_placement == "pre":
            _fill_norm(side.layer_norm, stack.final_norm)
        for layer_spec, layer in zip(side.layer, stack.layers, strict=True):
            assert isinstance(layer, EncoderLayer | DecoderLayer)
            _fill_layer(layer_spec, layer)
            if config.positions == "t5_relative":
                layer_spec.self_attention.relative_attention_bias = _array(stack.relative_bias.weight)
                reach = np.dtype("int32").type(config.relative_max_distance)
                layer_spec.self_attention.relative_attention_max_distance = reach
    _fill_linear(spec.decoder.projection, model.output)


def _fill_layer(spec: Any, layer: EncoderLayer | DecoderLayer) -> None:
    attention = layer.self_attention
    assert isinstance(attention, SelfAttention), "CTranslate2 has no recurrent decoders"
    _fill_self_attention(spec.self_attention, attention)
    _fill_norm(spec.self_attention.layer_norm, layer.self_residual.norm)
    if isinstance(layer, DecoderLayer) and layer.cross_attention and layer.cross_residual:
        _fill_cross_attention(spec.attention, layer.cross_attention)
        _fill_norm(spec.attention.layer_norm, layer.cross_residual.norm)
    _fill_feed_forward(spec.ffn, layer.feed_forward)
    _fill_norm(spec.ffn.layer_norm, layer.feed_forward_residual.norm)


def _fill_self_attention(spec: Any, attention: SelfAttention) -> None:
    spec.queries_scale = np.float32(attention.scale)
    _fill_linear(spec.linear[0], attention.qkv)
    _fill_linear(spec.linear[1], attention.out)


def _fill_cross_attention(spec: Any, attention: CrossAttention) -> None:
    spec.queries_scale = np.float32(attention.scale)
    for part, module in zip(spec.linear, (attention.query, attention.kv, attention.out), strict=True):
        _fill_linear(part, module)


def _fill_feed_forward(spec: Any, feed_forward: FeedForward) -> None:
    if feed_forward.gated:
        spec.linear_0.weight, spec.linear_0_noact.weight = map(_array, feed_forward.inner.weight.chunk(2))
        if feed_forward.inner.bias is not None:
            spec.linear_0.bias, spec.linear_0_noact.bias = map(_array, feed_forward.inner.bias.chunk(2))
    else:
        _fill_linear(spec.linear_0, feed_forward.inner)
    _fill_linear(spec.linear_1, feed_forward.outer)


def _fill_linear(spec: Any, linear: nn.Linear) -> None:
    spec.weight = _array(linear.weight)
    if linear.bias is not None:
        spec.bias = _array(linear.bias)


def _fill_norm(spec: Any, norm: nn.Module) -> None:
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    spec.gamma = _array(norm.weight)
    if isinstance(norm, nn.LayerNorm):
        spec.beta = _array(norm.bias)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().float().numpy().copy()  # quantisation scales the array in place
