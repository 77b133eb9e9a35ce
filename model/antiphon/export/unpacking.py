"""Reconstruction of a checkpoint from the native graphs of a bundle: the same numbers, in float32.

Integer weights become integer * scale; norms, biases and learned positions are float32 in the graphs. Unused numbers
are not in the graphs: rows of the position table before the first position, and T5's buckets that no distance has. They
become zero.

Nodes are matched with modules by their order, which is the order of execution in packed.py. Names of
initialisers are not used, because they changed between versions of the exporter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from antiphon.bundle.manifest import Bundle, Precision
from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.errors import CheckpointError
from antiphon.export.graph_edit import constant_array
from antiphon.export.weights import unpack_weight
from antiphon.ops.operator import DOMAIN, Operator
from antiphon.ops.operators import OPERATORS
from antiphon.ops.operators.rows import ADD_NORM, EMBED
from antiphon.text.tokenizer import open_tokenizer
from antiphon.transformer.layers import DecoderLayer, EncoderLayer, FeedForward, SelfAttention, SimpleRecurrence
from antiphon.transformer.transformer import Stack, Transformer

P = TypeVar("P")


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
    if config.post_norms:
        raise CheckpointError(f"{bundle.path}: post_norms=True cannot be unpacked; import its checkpoint again")
    model = Transformer(config).eval()
    assert model.encoder is not None
    assert model.decoder is not None
    encoder, decoder = (_NativeGraph(bundle.file(name)) for name in (graphs.encoder_file, graphs.decoder_file))
    cross = [block.cross_attention.kv for block in model.decoder.blocks if block.cross_attention is not None]
    _fill(encoder, model.encoder, cross)
    _fill(decoder, model.decoder, [model.output])
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
    """Return the operator of each kind of node, with the precision of its packed weights if it has any."""
    by_name: dict[str, tuple[Operator, Precision | None]] = {}
    for operator in OPERATORS:
        by_name[operator.node_name] = (operator, None)
        for precision in get_args(Precision):
            if (packed := operator.packed_node(precision)) is not None:
                by_name[packed.name] = (operator, precision)
    return by_name


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
        names = [port.name for port in declared.inputs]
        index = names.index(name)
        return constant_array(self.node.inputs[index]) if index < len(self.node.inputs) else None

    def copy_to(self, target: Tensor, name: str) -> None:
        """Copy the constant of an input to a parameter of the model."""
        self._copy(self.constant(name), target, name)

    def copy_weight_to(self, target: Tensor, name: str) -> None:
        """Copy the packed weight of this name to a parameter [O, K] of the model."""
        (packed,) = (weight for weight in self.operator.weights if weight.name == name)
        assert self.precision is not None
        parts = [self.constant(part.name) for part in packed.inputs(self.precision)]
        outputs, inputs = target.shape
        count = self.node.attributes[packed.sizes[0]].as_int() if packed.sizes else outputs
        if count != outputs:
            raise CheckpointError(
                f"{self.graph}: {self.node.name} has {packed.sizes[0]}={count}, the manifest's model has {outputs}"
            )
        arrays = [part for part in parts if part is not None]
        self._copy(unpack_weight(arrays, self.precision, outputs, inputs), target, name)

    def _copy(self, array: NDArray[Any] | None, target: Tensor, name: str) -> None:
        shape = None if array is None else list(array.shape)
        if array is None or shape != list(target.shape):
            raise CheckpointError(
                f"{self.graph}: {name} of {self.node.name} has shape {shape}, expected {list(target.shape)}"
            )
        target.copy_(torch.from_numpy(np.array(array)))  # a copy, because arrays of external data are read-only


@dataclass(frozen=True, slots=True)
class _Parameters:
    """Weight and bias of a product or a norm among the inputs of a node. prefix: of their names."""

    node: _Node
    prefix: str

    def copy_to_product(self, product: nn.Linear) -> None:
        """Copy a packed weight, and the bias if the model has one."""
        self.node.copy_weight_to(product.weight, f"{self.prefix}weight")
        if product.bias is not None:
            self.node.copy_to(product.bias, f"{self.prefix}bias")

    def copy_to_norm(self, norm: nn.Module) -> None:
        """Copy the parameters that the norm has."""
        for name, parameter in norm.named_parameters():
            self.node.copy_to(parameter, self.prefix + name)


class _NativeGraph:
    """Nodes of one native graph in the order of execution: separate operators, and those for whole sublayers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._nodes = [_Node(path, node) for node in ir.load(path).graph if node.domain == DOMAIN]

    def embedding(self) -> _Node:
        """Return the node of the embedding, of which there must be one."""
        return _checked(self.path, EMBED.node_name, [node for node in self._nodes if node.operator is EMBED], 1)[0]

    def products(self, count: int) -> list[_Parameters]:
        """Return the parameters of every product, of which there must be `count`; the output's are the last."""
        products = [
            _Parameters(node, weight.name.removesuffix("weight"))
            for node in self._nodes
            if node.operator is not EMBED
            for weight in node.operator.weights
        ]
        return _checked(self.path, "products", products, count)

    def norms(self, count: int) -> list[_Parameters]:
        """Return the parameters of every norm, of which there must be `count`."""
        prefixes = {ADD_NORM.name: ""} | {
            operator.name: "norm_" for operator in OPERATORS if _has_input(operator, "norm_weight")
        }
        norms = [
            _Parameters(node, prefixes[node.operator.name]) for node in self._nodes if node.operator.name in prefixes
        ]
        return _checked(self.path, "norms", norms, count)

    def biased(self) -> _Node:
        """Return the first node with a bias by distance."""
        return next(node for node in self._nodes if _has_input(node.operator, "bias_table"))


def _has_input(operator: Operator, name: str) -> bool:
    return any(port.name == name for port in operator.inputs)


def _checked(path: Path, what: str, parts: list[P], count: int) -> list[P]:
    if len(parts) != count:
        raise CheckpointError(f"{path} has {len(parts)} {what}, the manifest's model has {count}")
    return parts


def _fill(graph: _NativeGraph, stack: Stack, later_products: Sequence[nn.Linear]) -> None:
    """Copy the numbers of a graph to encoder or decoder; `later_products` follow those of the layers."""
    layers = [layer for layer in stack.layers if isinstance(layer, EncoderLayer | DecoderLayer)]
    embed = graph.embedding()
    embed.copy_weight_to(stack.embedding.weight, "weight")
    if isinstance(stack.positions.table, nn.Parameter):
        assert stack.positions.vectors is not None
        stack.positions.table.zero_()
        embed.copy_to(stack.positions.vectors, "position_table")
    norms = list(_norms(stack, layers))
    for place, norm in zip(graph.norms(len(norms)), norms, strict=True):
        place.copy_to_norm(norm)
    products = [*(product for layer in layers for product in _products(layer)), *later_products]
    for place, product in zip(graph.products(len(products)), products, strict=True):
        place.copy_to_product(product)
    if stack.relative_bias.kind == "t5_relative":
        _fill_relative_bias(graph.biased(), stack)


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
    first = layer.self_attention
    if isinstance(first, SelfAttention):
        yield from (first.qkv, first.out)
    elif isinstance(first, SimpleRecurrence):
        yield first.input
    else:
        if isinstance(first.feed_forward, FeedForward):
            yield from (first.feed_forward.inner, first.feed_forward.outer)
        if first.input_gate is not None and first.average_gate is not None:
            yield from (first.input_gate, first.average_gate)
    if isinstance(layer, DecoderLayer) and layer.cross_attention is not None:
        yield from (layer.cross_attention.query, layer.cross_attention.out)
    yield from (layer.feed_forward.inner, layer.feed_forward.outer)


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
