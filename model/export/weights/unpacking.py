"""Reconstruction of a checkpoint from the native graphs of a bundle: the same numbers, in float32.

Integer weights become integer * scale; norms, biases and learned positions are float32 in the graphs. Unused numbers
are not in the graphs: rows of the position table before the first position, and T5's buckets that no distance has. They
become zero.

Nodes are matched with modules by their order, which is the order of execution in graphs/native_graph.py. Names of
initialisers are not used, because they changed between versions of the exporter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from antiphon.model.bundle.manifest import Bundle, Precision
from antiphon.model.checkpoints.checkpoint import Checkpoint, CheckpointError
from antiphon.model.export.graphs.graph_edit import constant_array
from antiphon.model.export.weights.packing import unpack_weight
from antiphon.model.ops.operator import DOMAIN, Operator
from antiphon.model.ops.operators.add_norm import ADD_NORM
from antiphon.model.ops.operators.all_operators import OPERATORS
from antiphon.model.ops.operators.embed import EMBED
from antiphon.model.ops.operators.linear import LINEAR
from antiphon.model.ops.operators.packed_attention import PACKED_ATTENTION
from antiphon.model.ops.operators.paged_attention import PAGED_SELF_ATTENTION
from antiphon.model.ops.operators.sample import SAMPLE
from antiphon.model.text.tokenizer import open_tokenizer
from antiphon.model.transformer.layers import DecoderLayer, EncoderLayer
from antiphon.model.transformer.transformer import Stack, Transformer


@torch.no_grad()
def unpack_checkpoint(bundle: Bundle, precision: Precision | None = None) -> Checkpoint:
    """Return the model of a bundle's native graphs in float32.

    precision: graphs to read; None: those that the server runs by default (`Bundle.graph_set`).
    Raises CheckpointError if the model is not an encoder-decoder, or if graphs and manifest describe different models;
    BundleError if the bundle has no native graphs of the precision.
    """
    manifest, graphs = bundle.manifest, bundle.graph_set(precision)
    config = manifest.model
    if config.architecture != "encoder-decoder":
        raise CheckpointError(
            f"{bundle.path}: architecture={config.architecture!r} cannot be unpacked; 'encoder-decoder' can"
        )
    model = Transformer(config).eval()
    assert model.encoder is not None
    assert model.decoder is not None
    encoder, decoder = (_NativeGraph(bundle.file(name)) for name in (graphs.encoder_file, graphs.decoder_file))
    cross = [block.cross_attention.kv for block in model.decoder.blocks if block.cross_attention is not None]
    _fill(encoder, model.encoder, PACKED_ATTENTION, later_products=cross)
    _fill(decoder, model.decoder, PAGED_SELF_ATTENTION)
    _fill_product(decoder.nodes(SAMPLE, 1)[0], model.output)
    return Checkpoint(
        config=config,
        model=model,
        tokenizer=open_tokenizer(bundle.path, manifest.text),
        text=manifest.text,
        text_folder=bundle.path,
        provenance=manifest.provenance,
        generation=manifest.generation,
    )


def _by_node_name() -> dict[str, tuple[Operator, Precision | None]]:
    """Return the operator of each kind of node, with the precision of its packed weight if it has one."""
    found: dict[str, tuple[Operator, Precision | None]] = {}
    for operator in OPERATORS:
        found[operator.node_name] = (operator, None)
        for precision in get_args(Precision):
            if (packed := operator.packed_node(precision)) is not None:
                found[packed.name] = (operator, precision)
    return found


_OPERATORS = _by_node_name()


@dataclass(frozen=True, slots=True)
class _Node:
    """One node of a native graph, with the constants that it reads."""

    graph: Path
    node: ir.Node

    @property
    def operator(self) -> Operator:
        return _OPERATORS[self.node.op_type][0]

    @property
    def precision(self) -> Precision | None:
        return _OPERATORS[self.node.op_type][1]

    def constant(self, name: str) -> NDArray[Any] | None:
        """Return the constant of an input; None if the input is computed or absent."""
        operator, precision = self.operator, self.precision
        declared = operator.node() if precision is None else operator.packed_node(precision)
        assert declared is not None
        names = [given.name for given in declared.inputs]
        index = names.index(name)
        return constant_array(self.node.inputs[index]) if index < len(self.node.inputs) else None

    def copy_to(self, target: Tensor, name: str) -> None:
        """Copy the constant of an input to a parameter of the model."""
        self._copy(self.constant(name), target, name)

    def copy_weight_to(self, target: Tensor) -> None:
        """Copy the packed weight to a parameter [O, K] of the model."""
        packed, precision = self.operator.weight, self.precision
        assert packed is not None
        assert precision is not None
        parts = [self.constant(part.name) for part in packed.parts[precision]]
        outputs, inputs = target.shape
        found = self.node.attributes[packed.sizes[0]].as_int()
        if found != outputs:
            raise CheckpointError(
                f"{self.graph}: {self.node.name} has {packed.sizes[0]}={found}, the manifest's model has {outputs}"
            )
        arrays = [part for part in parts if part is not None]
        self._copy(unpack_weight(arrays, precision, outputs, inputs), target, "weight")

    def _copy(self, array: NDArray[Any] | None, target: Tensor, name: str) -> None:
        shape = None if array is None else list(array.shape)
        if array is None or shape != list(target.shape):
            raise CheckpointError(
                f"{self.graph}: {name} of {self.node.name} has shape {shape}, expected {list(target.shape)}"
            )
        target.copy_(torch.from_numpy(np.array(array)))  # a copy, because arrays of external data are read-only


class _NativeGraph:
    """Nodes of one native graph by operator, in the order of execution."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._nodes = [_Node(path, node) for node in ir.load(path).graph if node.domain == DOMAIN]

    def nodes(self, operator: Operator, count: int) -> list[_Node]:
        """Return the nodes of an operator, of which there must be `count`."""
        found = [node for node in self._nodes if node.operator is operator]
        if len(found) != count:
            raise CheckpointError(
                f"{self._path} has {len(found)} nodes {operator.node_name}, the manifest's model has {count}"
            )
        return found


def _fill(graph: _NativeGraph, stack: Stack, attention: Operator, *, later_products: Sequence[nn.Linear] = ()) -> None:
    """Copy the numbers of a graph to encoder or decoder; `later_products` follow those of the layers."""
    layers = [layer for layer in stack.layers if isinstance(layer, EncoderLayer | DecoderLayer)]
    (embed,) = graph.nodes(EMBED, 1)
    embed.copy_weight_to(stack.embedding.weight)
    if isinstance(stack.positions.table, nn.Parameter):
        assert stack.positions.vectors is not None
        stack.positions.table.zero_()
        embed.copy_to(stack.positions.vectors, "position_table")
    norms = list(_norms(stack, layers))
    for node, norm in zip(graph.nodes(ADD_NORM, len(norms)), norms, strict=True):
        for name, parameter in norm.named_parameters():
            node.copy_to(parameter, name)
    products = [*(product for layer in layers for product in _products(layer)), *later_products]
    for node, product in zip(graph.nodes(LINEAR, len(products)), products, strict=True):
        _fill_product(node, product)
    if stack.relative_bias.kind == "t5_relative":
        _fill_relative_bias(graph.nodes(attention, len(layers))[0], stack)


def _norms(stack: Stack, layers: Sequence[EncoderLayer | DecoderLayer]) -> Iterator[nn.Module]:
    """Yield the norms of a stack in the order of execution; norms that the model lacks have no parameters."""
    places = [stack.embedding_norm]
    for layer in layers:
        places.append(layer.self_residual.norm)
        if isinstance(layer, DecoderLayer) and layer.cross_residual is not None:
            places.append(layer.cross_residual.norm)
        places.append(layer.feed_forward_residual.norm)
    places.append(stack.final_norm)
    return (norm for norm in places if not isinstance(norm, nn.Identity))


def _products(layer: EncoderLayer | DecoderLayer) -> Iterator[nn.Linear]:
    """Yield the products of a layer in the order of execution."""
    yield from (layer.self_attention.qkv, layer.self_attention.out)
    if isinstance(layer, DecoderLayer) and layer.cross_attention is not None:
        yield from (layer.cross_attention.query, layer.cross_attention.out)
    yield from (layer.feed_forward.inner, layer.feed_forward.outer)


def _fill_product(node: _Node, product: nn.Linear) -> None:
    node.copy_weight_to(product.weight)
    if product.bias is not None:
        node.copy_to(product.bias, "bias")


def _fill_relative_bias(node: _Node, stack: Stack) -> None:
    """Copy T5's bias of each bucket from the table of distances [H, 2 * reach + 1]."""
    bias = stack.relative_bias
    table = node.constant("bias_table")
    reach = 0 if table is None else table.shape[1] // 2
    buckets = bias.buckets_by_distance(reach)
    by_distance = torch.empty(bias.weight.shape[1], len(buckets))
    node.copy_to(by_distance, "bias_table")
    bias.weight.zero_()
    bias.weight[buckets] = by_distance.T
