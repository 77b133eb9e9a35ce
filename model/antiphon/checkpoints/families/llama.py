"""Llama (Touvron et al. 2023), Mistral and Qwen2: decoder-only, with rotary positions, RMSNorm, gated feed-forward.

Linear scaling and Llama 3.1's scaling of rotary positions are supported. Mistral (Jiang et al. 2023) is limited to the
length of its sliding window. Qwen2 has biases on queries, keys and values.
Grouped-query attention (Ainslie et al. 2023): each key and value head is repeated for all query heads of its group. So
caches and projections are num_attention_heads / num_key_value_heads times as large as necessary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from antiphon.architecture.config import LinearScaling, Llama3Scaling, ModelConfig
from antiphon.checkpoints.families.family import Family
from antiphon.checkpoints.settings import (
    Settings,
    activation,
    describe,
    is_tied,
    refuse_head,
    setting,
    token_id,
)
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.checkpoints.text_formats import tokenizers_format
from antiphon.errors import SourceError
from antiphon.text.format import TextFormat
from antiphon.transformer.layers import DecoderLayer
from antiphon.transformer.transformer import Transformer

_EMBEDDING, _OUTPUT = "embed_tokens.weight", "lm_head.weight"
_MAX_LEN = 65536  # maximum of ModelConfig.max_target_len
_DEFAULT_LEN = 2048
_SCALED: dict[str, type[LinearScaling] | type[Llama3Scaling]] = {"linear": LinearScaling, "llama3": Llama3Scaling}


def resolve(settings: Settings, weights: SourceWeights) -> Settings:
    """Return the settings with tie_word_embeddings and has_bias (any projection has a bias) as the tensors show."""
    refuse_head(settings, ["ForCausalLM"])
    weights.strip_prefix("model.")
    has_bias = any(name.endswith("_proj.bias") for name in weights.names)
    return {**settings, "tie_word_embeddings": is_tied(settings, weights, _EMBEDDING, _OUTPUT), "has_bias": has_bias}


def configure(settings: Settings) -> ModelConfig:
    """Return the shape. If one projection has a bias, all have one here; missing biases are zeros."""
    rotation = _rotation(settings)
    width, heads = setting(settings, "hidden_size", int), setting(settings, "num_attention_heads", int)
    eos_id = token_id(settings, "eos_token_id", default=2)
    return describe(
        architecture="decoder",
        vocab_size=setting(settings, "vocab_size", int),
        d_model=width,
        encoder_layers=0,
        decoder_layers=setting(settings, "num_hidden_layers", int),
        num_heads=heads,
        head_dim=setting(settings, "head_dim", int, default=width // heads),
        d_ff=setting(settings, "intermediate_size", int),
        norm="rmsnorm",
        norm_placement="pre",
        norm_eps=setting(settings, "rms_norm_eps", float, default=1e-6),
        activation=activation(settings, "hidden_act"),
        gated=True,
        positions="rope",
        rope_theta=rotation["rope_theta"],
        rope_scaling=_scaling(settings, rotation),
        scale_embeddings=False,
        tie_output=setting(settings, "tie_word_embeddings", bool, default=False),
        bias=setting(settings, "has_bias", bool, default=False),
        dropout=0.0,
        max_target_len=_longest(settings),
        pad_id=token_id(settings, "pad_token_id", default=eos_id),
        bos_id=token_id(settings, "bos_token_id", default=eos_id),
        eos_id=eos_id,
        unk_id=0,
    )


def _rotation(settings: Settings) -> Settings:
    """Return `rope_scaling` of older files, or `rope_parameters` of transformers 5, with rope_theta.

    If both exist, rope_scaling is used, as in transformers. Raises SourceError for another type or partial rotation.
    """
    found = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise SourceError(f"config.json: rope_scaling or rope_parameters is {found!r}, expected an object")
    factor = found.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
    if factor != 1.0:
        raise SourceError(f"config.json: partial_rotary_factor is {factor!r}; only 1.0 is supported")
    return {"rope_theta": setting(settings, "rope_theta", float, default=10000.0)} | found


def _scaling(settings: Settings, rotation: Settings) -> dict[str, object] | None:
    """Return the existing fields of RopeScaling; the original training length can be in three places."""
    kind = rotation.get("rope_type", rotation.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _SCALED:
        known = ", ".join(map(repr, ("default", *_SCALED)))
        raise SourceError(f"config.json: rope scaling is of type {kind!r}; supported are {known}")
    name = "original_max_position_embeddings"
    length = settings.get("max_position_embeddings", _DEFAULT_LEN)
    fields = {**rotation, "kind": kind, name: settings.get(name, rotation.get(name, length))}
    return {key: fields[key] for key in _SCALED[kind].model_fields if key in fields}


def _longest(settings: Settings) -> int:
    """Return the maximum length; it is within the sliding window, where attention is the same as without a window."""
    longest = setting(settings, "max_position_embeddings", int, default=_DEFAULT_LEN)
    window = setting(settings, "sliding_window", int, default=longest)
    kinds = settings.get("layer_types") or ["sliding_attention"]  # Mistral has no list: all its layers have the window
    return min(longest, window if "sliding_attention" in kinds else longest, _MAX_LEN)


def load(model: Transformer, weights: SourceWeights, settings: Settings) -> None:
    """Fill the model; tensor names are those of LlamaForCausalLM, with or without the prefix `model.`."""
    decoder = model.decoder
    assert decoder is not None
    weights.strip_prefix("model.")
    weights.ignore("*rotary_emb.*")  # old files store rates, cosines and sines
    weights.fill_tied(decoder.embedding.weight, _EMBEDDING, *([_OUTPUT] if model.config.tie_output else []))
    if not model.config.tie_output:
        weights.fill(model.output.weight, _OUTPUT)
    weights.fill_module(decoder.final_norm, "norm")
    heads = model.config.num_heads
    key_heads = setting(settings, "num_key_value_heads", int, default=heads)
    if heads % key_heads:
        raise SourceError(
            f"config.json: num_key_value_heads is {key_heads}, which does not divide num_attention_heads, {heads}"
        )
    for index, layer in enumerate(decoder.blocks):
        _load_layer(layer, weights, f"layers.{index}", key_heads)


def _load_layer(layer: DecoderLayer, weights: SourceWeights, name: str, key_heads: int) -> None:
    attention, feed_forward = layer.self_attention, layer.feed_forward
    weights.fill_module(layer.self_residual.norm, f"{name}.input_layernorm")
    for part, ours in _parts(attention.qkv):
        query, *repeated = ours.chunk(3)
        _fill(query, weights, f"{name}.self_attn.q_proj.{part}")
        for letter, target in zip("kv", repeated, strict=True):
            _fill_repeated(target, weights, f"{name}.self_attn.{letter}_proj.{part}", attention.heads, key_heads)
    for part, ours in _parts(attention.out):
        _fill(ours, weights, f"{name}.self_attn.o_proj.{part}")
    weights.fill_module(layer.feed_forward_residual.norm, f"{name}.post_attention_layernorm")
    for part, ours in _parts(feed_forward.inner):
        for theirs, target in zip(("gate", "up"), ours.chunk(2), strict=True):
            _fill(target, weights, f"{name}.mlp.{theirs}_proj.{part}")
    for part, ours in _parts(feed_forward.outer):
        _fill(ours, weights, f"{name}.mlp.down_proj.{part}")


def _parts(layer: torch.nn.Linear) -> list[tuple[str, Tensor]]:
    return [(name, parameter.data) for name, parameter in layer.named_parameters()]


def _fill(ours: Tensor, weights: SourceWeights, name: str) -> None:
    """Fill a weight or a bias; a bias that the checkpoint does not have becomes zero."""
    if name.endswith(".bias") and name not in weights:
        ours.zero_()
    else:
        weights.fill(ours, name)


def _fill_repeated(ours: Tensor, weights: SourceWeights, name: str, heads: tuple[int, int], key_heads: int) -> None:
    """Fill keys or values, [H * D] or [H * D, M]: each head of the checkpoint is repeated for its query heads."""
    num_heads, width = heads
    grouped = torch.empty(key_heads * width, *ours.shape[1:], device=ours.device)
    _fill(grouped, weights, name)
    by_head = grouped.reshape(key_heads, width, *ours.shape[1:])
    ours.copy_(by_head.repeat_interleave(num_heads // key_heads, dim=0).reshape(ours.shape))


def text(folder: Path, settings: Settings, config: ModelConfig) -> TextFormat:
    """Return the text format of tokenizer.json; most of these models have the begin token before a prompt."""
    return tokenizers_format(folder)


FAMILY = Family(
    name="Llama",
    model_types=("llama", "mistral", "qwen2"),
    configure=configure,
    resolve=resolve,
    load=load,
    text=text,
    reference="AutoModelForCausalLM",
)
