"""GGUF files of llama.cpp: their settings and tensors, with the names and layouts that transformers gives to them.

The package gguf of llama.cpp parses a file and dequantises its tensors. A file holds key-value metadata, which describe
architecture and tokenizer, and tensors. llama.cpp permutes the rows of queries and keys of Llama for its rotation of
neighbouring pairs, and transposes GPT-2's matrices; both are undone here. Other settings than those below would change
the model, so a file with an unknown key of its architecture is refused.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from antiphon.architecture.config import Llama3Scaling
from antiphon.checkpoints.settings import Settings, in_one_line, setting
from antiphon.checkpoints.source_weights import SourceWeights
from antiphon.errors import SourceError
from antiphon.ops.fixed_positions import rotary_rates

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

_MAGIC = b"GGUF"
_ROPE_FACTORS = "rope_freqs.weight"
# What llama.cpp's converter takes for Llama 3.1 and 3.2; only the factor differs, and it is the largest of the tensor.
_LLAMA3 = dict(low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
# Keys of an architecture without an effect here: the size of the tokenizer, and facts about yarn, which is refused.
_IGNORED = ("vocab_size", "tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned")
# Keys that must have this value, which means that the feature is off.
_FIXED: Mapping[str, object] = {
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "use_parallel_residual": False,
}
_OPTIONAL = ("attention.head_count_kv", "rope.freq_base")
_READ = (
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scale_linear",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Architecture:
    """Names of one architecture.

    keys: setting of transformers for each key. constants: settings that a file does not state.
    tensors, layers: transformers' name for each tensor of the model and of a layer, without .weight or .bias.
    layer: prefix of a layer's tensors in transformers.
    transposed: tensors that are [outputs, inputs] in the file and [inputs, outputs] in transformers.
    permuted: setting that counts the heads of each tensor with permuted rows.
    """

    keys: Mapping[str, str]
    constants: Settings
    tensors: Mapping[str, str]
    layer: str
    layers: Mapping[str, str]
    transposed: tuple[str, ...] = ()
    permuted: Mapping[str, str] = field(default_factory=dict)


_QWEN2 = _Architecture(
    keys={
        "context_length": "max_position_embeddings",
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
    },
    constants=dict(model_type="qwen2", hidden_act="silu", use_sliding_window=False),
    tensors={"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    layer="model.layers",
    layers={
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
)
# Mistral's files have this architecture too.
_LLAMA = _Architecture(
    keys=_QWEN2.keys,
    constants=dict(model_type="llama", hidden_act="silu"),
    tensors=_QWEN2.tensors,
    layer=_QWEN2.layer,
    layers=_QWEN2.layers,
    permuted={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
)
_GPT2 = _Architecture(
    keys={
        "context_length": "n_positions",
        "block_count": "n_layer",
        "embedding_length": "n_embd",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    constants=dict(model_type="gpt2", activation_function="gelu_new"),
    tensors={
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    layer="transformer.h",
    layers={
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down"),
)
_ARCHITECTURES = {"gpt2": _GPT2, "llama": _LLAMA, "qwen2": _QWEN2}
# Settings of config.json and the keys of the tokenizer with the same ids.
SPECIAL_IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}


def is_gguf(path: Path) -> bool:
    """Return whether a path is a file in the GGUF format."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC


def gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file of a directory; None if it has none.

    Raises SourceError naming the files if there are several.
    """
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise SourceError(
            f"{folder} has several GGUF files; name one of them: {', '.join(file.name for file in files)}"
        )
    return files[0] if files else None


@contextmanager
def alone(path: Path) -> Iterator[Path]:
    """Yield a directory with a link of the file's name to it and nothing else.

    transformers reads a GGUF file by directory and name, and JSON files beside it that may belong to another model.
    """
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / path.name).symlink_to(path.resolve())
        yield folder


def read_metadata(path: Path, *names: str) -> dict[str, Any]:
    """Return the values of these keys that the file has. Raises SourceError naming the file if it cannot be read."""
    fields = _open(path).fields
    return {name: fields[name].contents() for name in names if name in fields}


def read_settings(path: Path) -> Settings:
    """Return the settings of config.json of transformers. Raises SourceError naming the key that is not supported."""
    reader = _open(path)
    architecture, layout = _architecture(path, reader)
    values = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    if (parts := values.get("split.count", 0)) > 1:
        raise SourceError(f"{path} is one of {parts} parts of a model; merge them first, by `llama-gguf-split --merge`")
    own = {
        name.removeprefix(f"{architecture}."): value
        for name, value in values.items()
        if name.startswith(f"{architecture}.")
    }
    _check_keys(path, architecture, own, layout)
    settings: dict[str, Any] = {**layout.constants}
    settings |= {name: own[key] for key, name in layout.keys.items() if key in own}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise SourceError(f"{path} has no tensor token_embd.weight")
    settings["vocab_size"] = _shape(tensors["token_embd.weight"])[0]
    settings["tie_word_embeddings"] = "output.weight" not in tensors
    settings |= _special_ids(reader)
    if "rope.freq_base" in layout.keys:
        settings |= _rotation(path, architecture, own, settings, tensors.get(_ROPE_FACTORS))
    return settings


def open_weights(folder: Path, *, on_meta: bool = False) -> SourceWeights:
    """Return the tensors of a file in float32, with the names and layouts of transformers.

    Raises SourceError naming a tensor whose type the package gguf cannot dequantise.
    """
    reader = _open(folder)
    _, layout = _architecture(folder, reader)
    settings = read_settings(folder)
    readers = {
        _renamed(tensor.name, layout): _tensor_reader(tensor, layout, settings, folder, on_meta=on_meta)
        for tensor in reader.tensors
        if tensor.name != _ROPE_FACTORS
    }
    return SourceWeights(readers, ExitStack(), on_meta=on_meta)


def _open(path: Path) -> GGUFReader:
    try:
        return _parsed(path, path.stat().st_mtime_ns)
    except ModuleNotFoundError:
        raise SourceError(f"{path} needs the package gguf: install 'antiphon[import]'") from None
    except (OSError, ValueError, KeyError, IndexError) as error:  # what a truncated file becomes
        raise SourceError(f"{path} cannot be read: {in_one_line(error)}; download it again") from None


@lru_cache(maxsize=1)
def _parsed(path: Path, _: int) -> GGUFReader:
    """Return the mapped file; the steps of an import share it, because parsing a vocabulary takes seconds."""
    from gguf import GGUFReader

    return GGUFReader(path)


def _architecture(path: Path, reader: GGUFReader) -> tuple[str, _Architecture]:
    named = reader.fields.get("general.architecture")
    name = None if named is None else str(named.contents())
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise SourceError(f"{path}: general.architecture is {name!r}; supported are {known}")
    return name, _ARCHITECTURES[name]


def _check_keys(path: Path, architecture: str, own: Settings, layout: _Architecture) -> None:
    """Raise SourceError naming a key of the architecture that is unknown, missing, or has an unsupported value."""
    for key, value in own.items():
        name = f"{path}: {architecture}.{key}"
        if key in _FIXED and value != _FIXED[key]:
            raise SourceError(f"{name} is {value!r}; only {_FIXED[key]!r} is supported")
        if key not in (*layout.keys, *_FIXED, *_READ, *_IGNORED):
            raise SourceError(f"{name} is not supported")
        if isinstance(value, list):
            raise SourceError(f"{name} is {value}; layers of different shapes are not supported")
    missing = [key for key in layout.keys if key not in own and key not in _OPTIONAL]
    if missing:
        raise SourceError(f"{path}: {architecture}.{missing[0]} is missing")


def _special_ids(reader: GGUFReader) -> dict[str, Any]:
    """Return the ids of special tokens; a token that ends a turn of a chat is a second end token."""
    fields = reader.fields
    ids: dict[str, Any] = {
        name: int(fields[f"tokenizer.ggml.{key}"].contents())
        for name, key in SPECIAL_IDS.items()
        if f"tokenizer.ggml.{key}" in fields
    }
    turn = fields.get("tokenizer.ggml.eot_token_id")
    if turn is not None and "eos_token_id" in ids and turn.contents() != ids["eos_token_id"]:
        ids["eos_token_id"] = [ids["eos_token_id"], int(turn.contents())]
    return ids


def _rotation(
    path: Path, architecture: str, own: Settings, settings: Settings, factors: ReaderTensor | None
) -> Settings:
    """Return head_dim and rope_parameters of transformers."""
    heads, width = setting(settings, "num_attention_heads", int), setting(settings, "hidden_size", int)
    head_dim = own.get("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if own.get(key, head_dim) != head_dim:
            raise SourceError(
                f"{path}: {architecture}.{key} is {own[key]}; only the width of a head, {head_dim}, is supported"
            )
    rotation = {"rope_type": "default", "rope_theta": settings.get("rope_theta", 10000.0)}
    kind, factor = (
        own.get("rope.scaling.type", "none"),
        own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0)),
    )
    if kind not in ("none", "linear"):
        raise SourceError(f"{path}: {architecture}.rope.scaling.type is {kind!r}; supported are 'none', 'linear'")
    if (kind == "linear" or "rope.scale_linear" in own) and factor != 1.0:
        rotation |= {"rope_type": "linear", "factor": factor}
    if factors is not None:
        rotation |= _llama3(path, _dequantised(factors, path), head_dim, rotation["rope_theta"])
    return {"head_dim": head_dim, "rope_parameters": rotation}


def _llama3(path: Path, factors: Tensor, head_dim: int, theta: float) -> dict[str, Any]:
    """Return Llama 3.1's scaling if it has these divisors of the rates, [D / 2]. Raises SourceError otherwise."""
    scaling = Llama3Scaling(factor=float(factors.max()), **_LLAMA3)  # type: ignore[arg-type]
    expected = rotary_rates(head_dim, theta, None) / rotary_rates(head_dim, theta, scaling)
    if factors.shape != expected.shape or not np.allclose(factors.numpy(), expected, rtol=1e-4):
        raise SourceError(
            f"{path}: {_ROPE_FACTORS} has not the factors of Llama 3.1 and 3.2, which alone are supported"
        )
    return {"rope_type": "llama3", **scaling.model_dump(exclude={"kind"})}


def _renamed(name: str, layout: _Architecture) -> str:
    """Return transformers' name of a tensor; the file's name if there is none, which is refused as unexpected."""
    stem, _, part = name.rpartition(".")
    if stem.startswith("blk."):
        _, index, inner = stem.split(".", 2)
        return f"{layout.layer}.{index}.{layout.layers[inner]}.{part}" if inner in layout.layers else name
    return f"{layout.tensors[stem]}.{part}" if stem in layout.tensors else name


def _tensor_reader(
    tensor: ReaderTensor, layout: _Architecture, settings: Settings, path: Path, *, on_meta: bool
) -> Callable[[], Tensor]:
    inner = tensor.name.split(".")[-2] if "." in tensor.name else tensor.name
    in_layer = tensor.name.startswith("blk.")

    def read() -> Tensor:
        values = torch.empty(_shape(tensor), device="meta") if on_meta else _dequantised(tensor, path)
        if in_layer and inner in layout.permuted:
            heads = setting(settings, layout.permuted[inner], int, default=settings.get("num_attention_heads"))
            values = _in_halves(values, heads)
        return values.T if in_layer and inner in layout.transposed and values.ndim == 2 else values

    return read


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _dequantised(tensor: ReaderTensor, path: Path) -> Tensor:
    """Return the values of a tensor as float32."""
    from gguf.quants import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise SourceError(
            f"{path}: the tensor {tensor.name} has the type {tensor.tensor_type.name}, which cannot be dequantised"
        ) from None
    return torch.from_numpy(values.copy()).float().reshape(_shape(tensor))


def _in_halves(values: Tensor, heads: int) -> Tensor:
    """Return rows [H * D] or [H * D, M] with the two rows of a rotated pair D / 2 apart instead of side by side."""
    if values.shape[0] % (2 * heads):
        return values  # another shape than expected, which is reported with its name
    return values.reshape(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
