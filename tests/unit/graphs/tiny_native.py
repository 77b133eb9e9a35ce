"""Network of tiny_graphs.py with native operators: packed batches, a block pool, sampling in the graph.

It is built node by node and follows the contract of manifest.GraphSet, so that tests of runner and operators need no
training and no export.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import (
    Bundle,
    CacheType,
    GraphSet,
    Manifest,
    file_entry,
    load_bundle,
    write_manifest,
)
from antiphon.text.format import TextFormat
from tests.unit.graphs.tiny_graphs import TinyModel

PANEL = 16
DOMAIN = "antiphon"
_PARAMS = {
    "picks": (["K"], TensorProto.INT32),
    "float_params": (["K", "F"], TensorProto.FLOAT),
    "int_params": (["K", "I"], TensorProto.INT64),
}


def write_native_bundle(path: Path, model: TinyModel, cache: CacheType = "float32") -> Bundle:
    """Write float32 native graphs and load the bundle."""
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text("{}")
    names = GraphSet(
        precision="float32", lowering="native", encoder="encoder.onnx", decoder="decoder.onnx", cache=cache
    )
    onnx.save(_encoder(model, cache), path / names.encoder_file)
    onnx.save(_decoder(model, cache), path / names.decoder_file)
    files = {file.name: file_entry(file) for file in sorted(path.iterdir()) if file.name != "manifest.json"}
    write_manifest(
        path,
        Manifest(
            name="tiny",
            model=model.config,
            text=TextFormat(template=("$text", model.config.eos_id)),
            graphs=(names,),
            files=files,
        ),
    )
    return load_bundle(path)


class _Graph:
    """Nodes of the antiphon operator domain, with their packed weights."""

    def __init__(self, model: TinyModel, cache: CacheType) -> None:
        self.config = model.config
        self.weights = model.weights
        self.nodes: list[onnx.NodeProto] = []
        self.packed: dict[str, NDArray[np.float32]] = {}
        kind = TensorProto.FLOAT if cache == "float32" else TensorProto.FLOAT16
        head_width = -(-model.config.resolved_head_dim // PANEL) * PANEL
        pool = ["blocks", model.config.decoder_layers, 2, model.config.num_heads, PANEL * head_width]
        self.inputs = [
            _tensor("input_ids", ["N"], TensorProto.INT64),
            _tensor("positions", ["N"], TensorProto.INT32),
            _tensor("offsets", ["ends"], TensorProto.INT32),
            _tensor("cache", pool, kind),
        ]

    def add(self, op_type: str, inputs: list[str], *outputs: str, domain: str = DOMAIN, **attributes: Any) -> str:
        outputs = outputs or (f"t{len(self.nodes)}",)
        self.nodes.append(helper.make_node(op_type, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def weight(self, name: str, matrix: NDArray[np.float32]) -> str:
        """Add a matrix [O, K], packed to [Op / 16, K, 16], and return its name."""
        outputs, inner = matrix.shape
        padded = np.zeros((-(-outputs // PANEL) * PANEL, inner), np.float32)
        padded[:outputs] = matrix
        self.packed[name] = np.ascontiguousarray(padded.reshape(-1, PANEL, inner).transpose(0, 2, 1))
        return name

    def linear(self, source: str, *names: str) -> str:
        """Add the product of source and the concatenated weights [K, O] of these names; return the output's name."""
        matrix = np.concatenate([self.weights[name] for name in names], axis=1).T
        weight = self.weight("+".join(names), matrix)
        return self.add("Linear", [source, weight], width=len(matrix), activation="none")

    def embed(self) -> str:
        weight = self.weight("embedding", self.weights["embedding"])
        width, vocab = self.config.d_model, self.config.vocab_size
        return self.add("Embed", ["input_ids", "positions", weight], scale=1.0, width=width, vocab=vocab)

    def attend(self, kind: str, x: str, projections: list[str], others: list[str], **attributes: Any) -> str:
        """Add an attention sublayer without a product after the attention; return its sum with x.

        projections: names of the weights to queries, or to queries, keys and values.
        """
        matrix = np.concatenate([self.weights[name] for name in projections], axis=1).T
        first = self.weight("+".join(projections), matrix)
        identity = self.weight("identity", np.eye(self.config.d_model, dtype=np.float32))
        prefix = "query" if kind == "PagedCrossAttentionSublayer" else "qkv"
        attributes |= {f"{prefix}_width": len(matrix), "num_heads": self.config.num_heads, "epsilon": 1e-5}
        attributes |= {"scale": self.config.resolved_attention_scale, "kind": "rms"}
        normed = f"t{len(self.nodes)}"
        self.add(kind, [x, x, first, "", identity, "", "", "", *others], normed, f"{normed}.sum", **attributes)
        return f"{normed}.sum"

    def model(self, outputs: list[onnx.ValueInfoProto]) -> onnx.ModelProto:
        initializers = [numpy_helper.from_array(array, name) for name, array in self.packed.items()]
        graph = helper.make_graph(self.nodes, "tiny", self.inputs, outputs, initializers)
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _encoder(model: TinyModel, cache: CacheType) -> onnx.ModelProto:
    graph = _Graph(model, cache)
    graph.inputs.append(_tensor("block_tables", ["B", "X"], TensorProto.INT32))
    embedded = graph.embed()
    attended = graph.attend("PackedAttentionSublayer", embedded, ["enc_q", "enc_k", "enc_v"], ["offsets"], causal=0)
    memory = graph.add("Identity", [attended], "memory", domain="")
    after: list[str] = []
    layers = model.config.decoder_layers
    for layer in range(layers):
        kv = graph.linear(memory, f"cross_k_{layer}", f"cross_v_{layer}")
        output = "written" if layer == layers - 1 else f"written{layer}"
        inputs = [kv, "cache", "block_tables", "offsets", *after]
        after = [graph.add("PagedWrite", inputs, output, num_heads=model.config.num_heads, layer=layer)]
    states = _tensor("memory", ["N", model.config.d_model], TensorProto.FLOAT)
    return graph.model([_tensor("written", [1], TensorProto.INT32), states])


def _decoder(model: TinyModel, cache: CacheType) -> onnx.ModelProto:
    graph = _Graph(model, cache)
    graph.inputs += [
        _tensor("self_tables", ["R", "X"], TensorProto.INT32),
        _tensor("cross_tables", ["R", "Y"], TensorProto.INT32),
        _tensor("source_lens", ["R"], TensorProto.INT32),
        *(_tensor(name, *shape_and_type) for name, shape_and_type in _PARAMS.items()),
        _tensor("edit_offsets", ["choice_ends"], TensorProto.INT32),
        _tensor("edit_ids", ["E"], TensorProto.INT32),
        _tensor("edit_values", ["E", 3], TensorProto.FLOAT),
    ]
    hidden = graph.embed()
    for layer in range(model.config.decoder_layers):
        others = ["cache", "self_tables", "offsets", "positions"]
        hidden = graph.attend("PagedSelfAttentionSublayer", hidden, [f"self_qkv_{layer}"], others, layer=layer)
        others = ["cache", "cross_tables", "offsets", "source_lens"]
        hidden = graph.attend("PagedCrossAttentionSublayer", hidden, [f"cross_q_{layer}"], others, layer=layer)
    operands = [hidden, "embedding", "positions", *_PARAMS, "edit_offsets", "edit_ids", "edit_values"]
    outputs = ["token_ids", "logprobs", "top_ids", "top_logprobs", "top_scores"]
    graph.add("Sample", operands, *outputs, vocab=model.config.vocab_size)
    kinds = [TensorProto.INT64, TensorProto.FLOAT] * 2 + [TensorProto.FLOAT]
    shapes = [["K"], ["K"], ["K", "k"], ["K", "k"], ["K", "k"]]
    return graph.model([_tensor(*port) for port in zip(outputs, shapes, kinds, strict=True)])


def _tensor(name: str, shape: list[Any], kind: int) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def tiny_native_config(max_len: int = 40) -> ModelConfig:
    """Return a shape with head width 8, which the pool rounds up to 16, and sequences of up to three blocks."""
    return ModelConfig(
        vocab_size=24, d_model=16, encoder_layers=1, decoder_layers=2, num_heads=2, d_ff=16,
        positions="none", max_source_len=max_len, max_target_len=max_len,
    )  # fmt: skip
