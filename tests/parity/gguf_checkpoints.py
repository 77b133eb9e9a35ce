"""GGUF files written from models of transformers, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from numpy.typing import NDArray

from antiphon.architecture.config import Llama3Scaling
from antiphon.ops.fixed_positions import rotary_rates
from tests.parity.decoder_checkpoints import write_decoder

# Rows of 64 and 96 numbers are whole blocks of 32.
_WIDE: dict[str, object] = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96)
SETTINGS: dict[str, dict[str, object]] = {
    "gpt2": dict(n_embd=64, n_inner=96),
    "llama": _WIDE | dict(head_dim=32),
    "llama3": _WIDE | dict(head_dim=32, rope_parameters=dict(
        rope_type="llama3", rope_theta=5e5, factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )),
    "llama_linear": _WIDE | dict(head_dim=32),
    "mistral": _WIDE | dict(sliding_window=None),
    "qwen2": _WIDE,
}  # fmt: skip
_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "ln_1": "attn_norm", "attn.c_attn": "attn_qkv", "attn.c_proj": "attn_output", "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down",
}  # fmt: skip
_MODEL = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "transformer.wte": "token_embd", "transformer.wpe": "position_embd", "transformer.ln_f": "output_norm",
}  # fmt: skip
BYTE_LEVEL: dict[str, object] = {"tokenizer.ggml.pre": "gpt-2"}


def write_gguf(path: Path, name: str, kind: str = "F32", keys: dict[str, object] | None = None, **settings: Any) -> Any:
    """Write a file of random weights in one type and return transformers' model before it was quantised.

    name: of decoder_checkpoints.DECODERS. keys: replace the file's keys; None leaves one out.
    """
    folder = path.parent / f"{path.stem}-original"
    model = write_decoder(folder, name, **SETTINGS[name] | settings)
    architecture = {"gpt2": "gpt2", "qwen2": "qwen2"}.get(name, "llama")
    writer = GGUFWriter(path, architecture)
    stated = _keys(architecture, model.config) | _vocabulary(folder, model.config) | (keys or {})
    for key, value in stated.items():
        _add(writer, key, value)
    for tensor, values in _tensors(architecture, model):
        stored = GGMLQuantizationType[kind] if values.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(tensor, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _add(writer: GGUFWriter, key: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, list)
        writer.add_array(key, value)


def _keys(architecture: str, config: Any) -> dict[str, object]:
    if architecture == "gpt2":
        return {
            "gpt2.context_length": config.n_positions,
            "gpt2.block_count": config.n_layer,
            "gpt2.embedding_length": config.n_embd,
            "gpt2.feed_forward_length": config.n_inner,
            "gpt2.attention.head_count": config.n_head,
            "gpt2.attention.layer_norm_epsilon": config.layer_norm_epsilon,
        }
    rotation = config.rope_parameters
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    keys: dict[str, object] = {
        "context_length": config.max_position_embeddings,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rotation["rope_theta"]),
        "rope.dimension_count": width,
        "vocab_size": config.vocab_size,
    }
    if architecture == "llama":
        keys |= {"attention.key_length": width, "attention.value_length": width}
    if rotation["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": rotation["factor"]}
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def _vocabulary(folder: Path, config: Any) -> dict[str, object]:
    """Return the keys of the tokenizer of a checkpoint; rows without a token are unused tokens."""
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    ids = described["model"]["vocab"]
    special = {token["content"] for token in described["added_tokens"]}
    tokens = sorted(ids, key=ids.get)
    kinds = [TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens]
    kinds = [TokenType.BYTE if token.startswith("<0x") else kind for token, kind in zip(tokens, kinds, strict=True)]
    unused = range(len(tokens), config.vocab_size)
    merges = [" ".join(merge) for merge in described["model"]["merges"]]
    is_marked = "<s>" in ids
    return {
        "tokenizer.ggml.model": "llama" if is_marked else "gpt2",
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{index}]" for index in unused)],
        "tokenizer.ggml.token_type": [*map(int, kinds), *(int(TokenType.UNUSED) for _ in unused)],
        "tokenizer.ggml.scores": [-float(index) for index in range(config.vocab_size)] if is_marked else None,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
    } | ({} if is_marked else BYTE_LEVEL)


def _tensors(architecture: str, model: Any) -> list[tuple[str, NDArray[np.float32]]]:
    config, tensors = model.config, []
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, part = name.rpartition(".")
        values = tensor.numpy()
        if stem not in _MODEL:
            _, _, index, inner = stem.split(".", 3)
            if architecture == "gpt2" and values.ndim == 2:
                values = values.T
            if architecture == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj"):
                values = _side_by_side(
                    values, config.num_attention_heads if "q_" in inner else config.num_key_value_heads
                )
            stored = f"blk.{index}.{_LAYER[inner]}.{part}"
        else:
            stored = f"{_MODEL[stem]}.{part}"
        tensors.append((stored, np.ascontiguousarray(values)))
    rotation = getattr(config, "rope_parameters", None) or {}
    if rotation.get("rope_type") == "llama3":
        scaling = Llama3Scaling(**{name: rotation[name] for name in Llama3Scaling.model_fields if name != "kind"})
        plain, scaled = (rotary_rates(config.head_dim, rotation["rope_theta"], kind) for kind in (None, scaling))
        tensors.append(("rope_freqs.weight", (plain / scaled).astype(np.float32)))
    return tensors


def _side_by_side(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Return rows with the two rows of each rotated pair side by side: `permute` of llama.cpp's converter."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
