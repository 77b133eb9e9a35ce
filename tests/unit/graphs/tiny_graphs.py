"""Tiny bundle: graphs built node by node, and the same network in NumPy as reference.

One encoder block without norms, decoder layers with cached self-attention and cross-attention, random weights. The
graphs follow the contract of manifest.GraphSet, so that tests of the runner need no training and no export.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import Bundle, GraphSet, Lowering, Manifest, file_entry, load_bundle, write_manifest
from antiphon.text.format import TextFormat

Array = NDArray[np.float32]
_NAMES = [("key", "k"), ("value", "v")]


def tiny_config(max_len: int = 24) -> ModelConfig:
    return ModelConfig(
        vocab_size=24, d_model=16, encoder_layers=1, decoder_layers=2, num_heads=2, d_ff=16,
        positions="none", max_source_len=max_len, max_target_len=max_len,
    )  # fmt: skip


@dataclass(frozen=True)
class TinyModel:
    """Weights by name, and reference outputs for one sequence, computed without caches."""

    config: ModelConfig
    weights: dict[str, Array]

    def memory(self, source: Sequence[int]) -> Array:
        """Return the encoder's states [S, M] of a source."""
        w = self.weights
        embedded = w["embedding"][list(source)]
        return embedded + self._attend(embedded @ w["enc_q"], embedded @ w["enc_k"], embedded @ w["enc_v"])

    def logits(self, source: Sequence[int], targets: Sequence[int]) -> Array:
        """Return the logits [V] of the token after targets."""
        w, width, memory = self.weights, self.config.d_model, self.memory(source)
        hidden = w["embedding"][list(targets)]
        causal = np.where(np.tri(len(targets), dtype=bool), 0, -np.inf).astype(np.float32)
        for layer in range(self.config.decoder_layers):
            query, key, value = np.split(hidden @ w[f"self_qkv_{layer}"], [width, 2 * width], axis=-1)
            hidden = hidden + self._attend(query, key, value, causal)
            keys, values = memory @ w[f"cross_k_{layer}"], memory @ w[f"cross_v_{layer}"]
            hidden = hidden + self._attend(hidden @ w[f"cross_q_{layer}"], keys, values)
        return np.asarray(hidden[-1] @ w["embedding"].T)

    def _attend(self, query: Array, key: Array, value: Array, mask: Array | float = 0.0) -> Array:
        heads = self.config.num_heads
        q, k, v = (x.reshape(len(x), heads, -1).swapaxes(0, 1) for x in (query, key, value))
        scores = q @ k.swapaxes(1, 2) * q.shape[-1] ** -0.5 + mask
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = weights / weights.sum(axis=-1, keepdims=True) @ v
        return np.asarray(mixed.swapaxes(0, 1).reshape(query.shape))


def tiny_model(config: ModelConfig, seed: int = 0) -> TinyModel:
    generator = np.random.default_rng(seed)
    width = config.d_model
    shapes = {"embedding": (config.vocab_size, width), **{f"enc_{part}": (width, width) for part in "qkv"}}
    for layer in range(config.decoder_layers):
        shapes[f"self_qkv_{layer}"] = (width, 3 * width)
        shapes |= {f"cross_{part}_{layer}": (width, width) for part in "qkv"}
    scale = width**-0.5
    return TinyModel(config, {k: generator.normal(0, scale, s).astype(np.float32) for k, s in shapes.items()})


def write_bundle(path: Path, model: TinyModel, lowerings: Sequence[Lowering] = ("contrib",)) -> Bundle:
    """Write float32 graphs of each lowering and load the bundle; lowerings differ only in the encoder."""
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text("{}")
    decoder = _decoder(model)
    graphs = []
    for lowering in lowerings:
        names = GraphSet(
            precision="float32", lowering=lowering, encoder=f"encoder.{lowering}.onnx", decoder="decoder.onnx"
        )
        onnx.save(_encoder(model, lowering), path / names.encoder_file)
        onnx.save(decoder, path / names.decoder_file)
        graphs.append(names)
    files = {file.name: file_entry(file) for file in sorted(path.iterdir()) if file.name != "manifest.json"}
    write_manifest(
        path,
        Manifest(
            name="tiny",
            model=model.config,
            text=TextFormat(template=("$text", model.config.eos_id)),
            graphs=tuple(graphs),
            files=files,
        ),
    )
    return load_bundle(path)


class _Nodes(list[onnx.NodeProto]):
    """List of nodes; each call appends one node and returns its first output."""

    def add(self, kind: str, inputs: Sequence[str], *outputs: str, domain: str = "", **attributes: Any) -> str:
        outputs = outputs or (f"t{len(self)}",)
        self.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))
        return outputs[0]


def _encoder(model: TinyModel, lowering: Lowering) -> onnx.ModelProto:
    config, nodes = model.config, _Nodes()
    embedded = nodes.add("Gather", ["embedding", "input_ids"])
    query, key, value = (nodes.add("MatMul", [embedded, f"enc_{part}"]) for part in "qkv")
    if lowering == "contrib":
        attended = nodes.add(
            "MultiHeadAttention", [query, key, value], domain="com.microsoft", num_heads=config.num_heads
        )
    else:
        attended = _eager_attention(nodes, query, key, value)
    memory = nodes.add("Add", [embedded, attended])
    outputs = []
    for layer in range(config.decoder_layers):
        for name, part in _NAMES:
            outputs.append(f"present.{layer}.encoder.{name}")
            projected = nodes.add("MatMul", [memory, f"cross_{part}_{layer}"])
            _split_heads(nodes, projected, outputs[-1])
    kv = [_tensor(name, ["B", config.num_heads, "S", config.resolved_head_dim]) for name in outputs]
    return _model(model, nodes, [_tensor("input_ids", ["B", "S"], TensorProto.INT64)], kv)


def _eager_attention(nodes: _Nodes, query: str, key: str, value: str) -> str:
    q, k, v = (_split_heads(nodes, x) for x in (query, key, value))
    scores = nodes.add("MatMul", [q, nodes.add("Transpose", [k], perm=[0, 1, 3, 2])])
    weights = nodes.add("Softmax", [nodes.add("Mul", [scores, "scale"])], axis=-1)
    mixed = nodes.add("Transpose", [nodes.add("MatMul", [weights, v])], perm=[0, 2, 1, 3])
    return nodes.add("Reshape", [mixed, "joined_shape"])


def _split_heads(nodes: _Nodes, array: str, *output: str) -> str:
    return nodes.add("Transpose", [nodes.add("Reshape", [array, "split_shape"])], *output, perm=[0, 2, 1, 3])


def _decoder(model: TinyModel) -> onnx.ModelProto:
    config, nodes = model.config, _Nodes()
    lengths = [_tensor(name, ["B"], TensorProto.INT32) for name in ("past_lens", "source_lens")]
    inputs, outputs = [_tensor("input_ids", ["B", 1], TensorProto.INT64), *lengths], []
    hidden = nodes.add("Gather", ["embedding", "input_ids"])
    last_source = nodes.add("Sub", ["source_lens", "one"])
    heads: dict[str, Any] = {"num_heads": config.num_heads, "kv_num_heads": config.num_heads, "domain": "com.microsoft"}
    for layer in range(config.decoder_layers):
        past = f"past_key_values.{layer}"
        cache = [f"{past}.decoder.key", f"{past}.decoder.value"]
        cross = [f"{past}.encoder.key", f"{past}.encoder.value"]
        present = [f"present.{layer}.decoder.key", f"present.{layer}.decoder.value"]
        packed = nodes.add("MatMul", [hidden, f"self_qkv_{layer}"])
        out = nodes.add(
            "GroupQueryAttention", [packed, "", "", *cache, "past_lens", "self_total"], f"a{layer}", *present, **heads
        )
        hidden = nodes.add("Add", [hidden, out])
        query = nodes.add("MatMul", [hidden, f"cross_q_{layer}"])
        none = nodes.add("Slice", [query, "zero_1d", "zero_1d", "one_1d"])
        out = nodes.add(
            "GroupQueryAttention", [query, none, none, *cross, last_source, "cross_total"], causal=0, **heads
        )
        hidden = nodes.add("Add", [hidden, out])
        inputs += [_tensor(name, ["B", config.num_heads, "C", config.resolved_head_dim]) for name in cache]
        inputs += [_tensor(name, ["B", config.num_heads, "E", config.resolved_head_dim]) for name in cross]
        outputs += [_tensor(name, ["B", config.num_heads, "C", config.resolved_head_dim]) for name in present]
    nodes.add("MatMul", [nodes.add("Squeeze", [hidden, "one_1d"]), "unembedding"], "logits")
    return _model(model, nodes, inputs, [_tensor("logits", ["B", config.vocab_size]), *outputs])


def _tensor(name: str, shape: Sequence[int | str], kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _model(
    model: TinyModel, nodes: _Nodes, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]
) -> onnx.ModelProto:
    config = model.config
    constants: dict[str, NDArray[Any]] = {
        **model.weights,
        "unembedding": np.ascontiguousarray(model.weights["embedding"].T),
        "split_shape": np.array([0, 0, config.num_heads, config.resolved_head_dim], np.int64),
        "joined_shape": np.array([0, 0, config.d_model], np.int64),
        "scale": np.array(config.resolved_attention_scale, np.float32),
        "one": np.array(1, np.int32),
        "zero_1d": np.array([0], np.int64),
        "one_1d": np.array([1], np.int64),
        "self_total": np.array(config.max_target_len, np.int32),
        "cross_total": np.array(config.max_source_len, np.int32),
    }
    used = {name for node in nodes for name in node.input}
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items() if name in used]
    graph = helper.make_graph(list(nodes), "tiny", list(inputs), list(outputs), initializers)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
