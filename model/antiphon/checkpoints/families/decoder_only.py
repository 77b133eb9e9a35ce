"""GPT-2 and Llama: decoder-only families.

GPT-2 (Radford et al. 2019) has learned positions and pre-norm layers.

Llama (Touvron et al. 2023), Mistral and Qwen2 have rotary positions, RMSNorm and a gated feed-forward. Linear scaling
and Llama 3.1's scaling of rotary positions are supported. Mistral (Jiang et al. 2023) is limited to the length of its
sliding window. Qwen2 has biases on queries, keys and values.
Grouped-query attention (Ainslie et al. 2023): each key and value head is repeated for all query heads of its group. So
caches and projections are num_attention_heads / num_key_value_heads times as large as necessary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from antiphon.architecture.config import LinearScaling, Llama3Scaling, ModelConfig
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
from antiphon.errors import SourceError
from antiphon.transformer.layers import DecoderLayer, self_attention_of
from antiphon.transformer.transformer import Transformer

_GPT2_EMBEDDING, _LLAMA_EMBEDDING, _OUTPUT = "wte.weight", "embed_tokens.weight", "lm_head.weight"
_MAX_LEN = 65536  # maximum of ModelConfig.max_target_len
_DEFAULT_LEN = 2048
_SCALED: dict[str, type[LinearScaling] | type[Llama3Scaling]] = {"linear": LinearScaling, "llama3": Llama3Scaling}


def _resolve_gpt2(settings: Settings, weights: SourceWeights) -> Settings:
    """Return the settings with tie_word_embeddings as the tensors show."""
    refuse_head(settings, ["LMHeadModel", "ForCausalLM"])
    weights.strip_prefix("transformer.")
    return {**settings, "tie_word_embeddings": is_tied(settings, weights, _GPT2_EMBEDDING, _OUTPUT)}


def _configure_gpt2(settings: Settings) -> ModelConfig:
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


def _load_gpt2(model: Transformer, weights: SourceWeights, _: Settings) -> None:
    """Fill the model; tensor names are those of GPT2LMHeadModel, with or without the prefix `transformer.`."""
    decoder = model.decoder
    assert decoder is not None
    assert decoder.positions.table is not None
    weights.strip_prefix("transformer.")
    weights.ignore("h.*.attn.bias")  # old files store the causal mask
    weights.ignore("h.*.attn.masked_bias")
    weights.fill_tied(decoder.embedding.weight, _GPT2_EMBEDDING, *([_OUTPUT] if model.config.tie_output else []))
    if not model.config.tie_output:
        weights.fill(model.output.weight, _OUTPUT)
    weights.fill_start(decoder.positions.table, "wpe.weight")
    weights.fill_module(decoder.final_norm, "ln_f")
    for index, layer in enumerate(decoder.blocks):
        _load_gpt2_layer(layer, weights, f"h.{index}")


def _load_gpt2_layer(layer: DecoderLayer, weights: SourceWeights, name: str) -> None:
    weights.fill_module(layer.self_residual.norm, f"{name}.ln_1")
    _fill_transposed(self_attention_of(layer).qkv, weights, f"{name}.attn.c_attn")
    _fill_transposed(self_attention_of(layer).out, weights, f"{name}.attn.c_proj")
    weights.fill_module(layer.feed_forward_residual.norm, f"{name}.ln_2")
    _fill_transposed(layer.feed_forward.inner, weights, f"{name}.mlp.c_fc")
    _fill_transposed(layer.feed_forward.outer, weights, f"{name}.mlp.c_proj")


def _fill_transposed(ours: nn.Linear, weights: SourceWeights, name: str) -> None:
    """Fill a linear layer from a Conv1D of transformers, whose weight is [inputs, outputs]."""
    weights.fill(ours.weight.data.T, f"{name}.weight")  # a view, so the copy changes the parameter
    weights.fill(ours.bias, f"{name}.bias")


GPT2 = Family(
    name="GPT-2",
    model_types=("gpt2",),
    configure=_configure_gpt2,
    resolve=_resolve_gpt2,
    load=_load_gpt2,
    reference="AutoModelForCausalLM",
    input_first=("c_attn", "c_proj", "c_fc"),
)


def _resolve_llama(settings: Settings, weights: SourceWeights) -> Settings:
    """Return the settings with tie_word_embeddings and has_bias (any projection has a bias) as the tensors show."""
    refuse_head(settings, ["ForCausalLM"])
    weights.strip_prefix("model.")
    has_bias = any(name.endswith("_proj.bias") for name in weights.names)
    return {
        **settings,
        "tie_word_embeddings": is_tied(settings, weights, _LLAMA_EMBEDDING, _OUTPUT),
        "has_bias": has_bias,
    }


def _configure_llama(settings: Settings) -> ModelConfig:
    """Return the shape. If one projection has a bias, all have one here; missing biases are zeros."""
    rotation = rotation_of(settings)
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
        rope_scaling=scaling_of(settings, rotation),
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


def rotation_of(settings: Settings) -> Settings:
    """Return `rope_scaling` of older files, or `rope_parameters` of transformers 5, with rope_theta.

    If both exist, rope_scaling is used, as in transformers. Raises SourceError for another type or partial rotation.
    """
    rotation = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(rotation, dict):
        raise SourceError(f"config.json: rope_scaling or rope_parameters is {rotation!r}, expected an object")
    factor = rotation.get("partial_rotary_factor", settings.get("partial_rotary_factor", 1.0))
    if factor != 1.0:
        raise SourceError(f"config.json: partial_rotary_factor is {factor!r}; only 1.0 is supported")
    return {"rope_theta": setting(settings, "rope_theta", float, default=10000.0)} | rotation


def scaling_of(settings: Settings, rotation: Settings) -> dict[str, object] | None:
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


def _load_llama(model: Transformer, weights: SourceWeights, settings: Settings) -> None:
    """Fill the model; tensor names are those of LlamaForCausalLM, with or without the prefix `model.`."""
    decoder = model.decoder
    assert decoder is not None
    weights.strip_prefix("model.")
    weights.ignore("*rotary_emb.*")  # old files store rates, cosines and sines
    weights.fill_tied(decoder.embedding.weight, _LLAMA_EMBEDDING, *([_OUTPUT] if model.config.tie_output else []))
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
        _load_llama_layer(layer, weights, f"layers.{index}", key_heads)


def _load_llama_layer(layer: DecoderLayer, weights: SourceWeights, name: str, key_heads: int) -> None:
    attention, feed_forward = self_attention_of(layer), layer.feed_forward
    weights.fill_module(layer.self_residual.norm, f"{name}.input_layernorm")
    for part, ours in parts_of(attention.qkv):
        query, *repeated = ours.chunk(3)
        fill_or_zero(query, weights, f"{name}.self_attn.q_proj.{part}")
        for letter, target in zip("kv", repeated, strict=True):
            fill_repeated(target, weights, f"{name}.self_attn.{letter}_proj.{part}", attention.heads, key_heads)
    for part, ours in parts_of(attention.out):
        fill_or_zero(ours, weights, f"{name}.self_attn.o_proj.{part}")
    weights.fill_module(layer.feed_forward_residual.norm, f"{name}.post_attention_layernorm")
    for part, ours in parts_of(feed_forward.inner):
        for theirs, target in zip(("gate", "up"), ours.chunk(2), strict=True):
            fill_or_zero(target, weights, f"{name}.mlp.{theirs}_proj.{part}")
    for part, ours in parts_of(feed_forward.outer):
        fill_or_zero(ours, weights, f"{name}.mlp.down_proj.{part}")


def parts_of(layer: nn.Linear) -> list[tuple[str, Tensor]]:
    """Return the data of weight and bias with their names."""
    return [(name, parameter.data) for name, parameter in layer.named_parameters()]


def fill_or_zero(ours: Tensor, weights: SourceWeights, name: str) -> None:
    """Fill a weight or a bias; a bias that the checkpoint does not have becomes zero."""
    if name.endswith(".bias") and name not in weights:
        ours.zero_()
    else:
        weights.fill(ours, name)


def fill_repeated(ours: Tensor, weights: SourceWeights, name: str, heads: tuple[int, int], key_heads: int) -> None:
    """Fill keys or values, [H * D] or [H * D, M]: each head of the checkpoint is repeated for its query heads."""
    num_heads, width = heads
    grouped = torch.empty(key_heads * width, *ours.shape[1:], device=ours.device)
    fill_or_zero(grouped, weights, name)
    by_head = grouped.reshape(key_heads, width, *ours.shape[1:])
    ours.copy_(by_head.repeat_interleave(num_heads // key_heads, dim=0).reshape(ours.shape))


LLAMA = Family(
    name="Llama",
    model_types=("llama", "mistral", "qwen2"),
    configure=_configure_llama,
    resolve=_resolve_llama,
    load=_load_llama,
    reference="AutoModelForCausalLM",
)
