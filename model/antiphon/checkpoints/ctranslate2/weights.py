"""Loading of CTranslate2 tensors into our model, by the names of CTranslate2's Transformer specification."""

from __future__ import annotations

from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.settings import Settings
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.transformer.layers import DecoderLayer, EncoderLayer
from antiphon.transformer.transformer import Stack, Transformer


def load(model: Transformer, weights: SourceWeights, _: Settings) -> None:
    """Fill the model with the tensors of a model.bin."""
    assert model.encoder is not None
    assert model.decoder is not None
    config = model.config
    target = ["decoder/embeddings/weight"]
    if config.tie_source_target:
        target.append("encoder/embeddings/weight")
    else:
        weights.fill(model.encoder.embedding.weight, "encoder/embeddings/weight")
    if config.tie_output:
        target.append("decoder/projection/weight")
    else:
        weights.fill(model.output.weight, "decoder/projection/weight")
    weights.fill_tied(model.decoder.embedding.weight, *target)
    if config.output_bias:
        weights.fill(model.output.bias, "decoder/projection/bias")
    # Every layer can have the bias table; the first layer's table is used.
    weights.ignore("*/layer_[1-9]*/self_attention/relative_attention_bias")
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        _load_stack(stack, weights, name, config)


def _load_stack(stack: Stack, weights: SourceWeights, name: str, config: ModelConfig) -> None:
    if config.positions == "learned" and stack.positions.table is not None:
        weights.fill(stack.positions.table, f"{name}/position_encodings/encodings")
    if config.positions == "t5_relative":
        weights.fill(stack.relative_bias.weight, f"{name}/layer_0/self_attention/relative_attention_bias")
    if config.embedding_norm:
        _fill_norm(stack.embedding_norm, weights, f"{name}/layernorm_embedding")
    if config.norm_placement == "pre":
        _fill_norm(stack.final_norm, weights, f"{name}/layer_norm")
    for index, layer in enumerate(stack.layers):
        assert isinstance(layer, EncoderLayer | DecoderLayer)
        _load_layer(layer, weights, f"{name}/layer_{index}")


def _load_layer(layer: EncoderLayer | DecoderLayer, weights: SourceWeights, name: str) -> None:
    theirs = f"{name}/self_attention"
    _fill_linear(layer.self_attention.qkv, weights, f"{theirs}/linear_0")
    _fill_linear(layer.self_attention.out, weights, f"{theirs}/linear_1")
    _fill_norm(layer.self_residual.norm, weights, f"{theirs}/layer_norm")
    if isinstance(layer, DecoderLayer) and layer.cross_attention is not None and layer.cross_residual is not None:
        cross, theirs = layer.cross_attention, f"{name}/attention"
        for index, linear in enumerate((cross.query, cross.kv, cross.out)):
            _fill_linear(linear, weights, f"{theirs}/linear_{index}")
        _fill_norm(layer.cross_residual.norm, weights, f"{theirs}/layer_norm")
    theirs, part = f"{name}/ffn", layer.feed_forward
    _fill_linear(part.inner, weights, f"{theirs}/linear_0", *([f"{theirs}/linear_0_noact"] if part.gated else []))
    _fill_linear(part.outer, weights, f"{theirs}/linear_1")
    _fill_norm(layer.feed_forward_residual.norm, weights, f"{theirs}/layer_norm")


def _fill_linear(linear: nn.Linear, weights: SourceWeights, *names: str) -> None:
    weights.fill(linear.weight, *(f"{name}/weight" for name in names))
    if linear.bias is not None:
        weights.fill(linear.bias, *(f"{name}/bias" for name in names))


def _fill_norm(norm: nn.Module, weights: SourceWeights, name: str) -> None:
    for ours, theirs in (("weight", "gamma"), ("bias", "beta")):
        if isinstance(values := getattr(norm, ours, None), Tensor):
            weights.fill(values, f"{name}/{theirs}")
