"""Cuda graphs run step by step on the CPU; bundle_model.py is the same for native graphs.

A graph is computed node by node, by the references of ops/cuda/references.py. Products are summed in float32 and
rounded to the graph's element type, as on a GPU.

Blocks are assigned in shuffled order and the pool starts full of NaN. Each batch has one token and one tile of padding.
The first new token of each row is given as the token that the row sampled before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.tensor_adapters import to_torch_dtype
from torch import Tensor
from torch.nn import functional

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import Task
from antiphon.bundle.manifest import GraphSet
from antiphon.errors import StepError
from antiphon.export.bundle_model import (
    Floats,
    Ids,
    Lens,
    Sequences,
    listed_logprobs,
    offsets_of,
    reserve,
    sampling_inputs,
    whole_vocabulary,
)
from antiphon.export.ports import head_outputs
from antiphon.ops.cache_geometry import cuda_pool_axes, target_block_size
from antiphon.ops.cuda import PADDING, PREVIOUS, TILE
from antiphon.ops.cuda.nodes import NODES
from antiphon.ops.cuda.references import REFERENCES
from antiphon.ops.operator import Node

_NODES: Mapping[str, Node] = {node.name: node for node in NODES}


class CudaEvaluator:
    """One graph of a bundle, with its weights in memory."""

    def __init__(self, graph: Path | ir.Model) -> None:
        model = ir.load(graph) if isinstance(graph, Path) else graph
        self._graph = model.graph
        self._weights = {name: _weight(value.const_value) for name, value in model.graph.initializers.items()}

    @property
    def input_names(self) -> tuple[str, ...]:
        """Return the names of the graph's inputs in their order."""
        return tuple(str(value.name) for value in self._graph.inputs)

    @property
    def element(self) -> ir.DataType:
        """Return the element type of states, which is that of the first product's weight."""
        weight = next(node.inputs[1] for node in self._graph if node.op_type == "Gemm")
        assert weight is not None
        assert weight.dtype is not None
        return weight.dtype

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return every output of the graph by name; inputs are all the graph's, and a cache is changed in place."""
        self._check_inputs(inputs)
        values = {**self._weights, **inputs}
        for node in self._graph:
            operands = [None if value is None else values[str(value.name)] for value in node.inputs]
            values.update(zip((str(value.name) for value in node.outputs), _computed(node, operands), strict=False))
        return {str(value.name): values[str(value.name)] for value in self._graph.outputs}

    def _check_inputs(self, inputs: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless the inputs have the graph's names, types, and sizes of its fixed axes."""
        if sorted(inputs) != sorted(self.input_names):
            raise ValueError(f"the graph has inputs {sorted(self.input_names)}, not {sorted(inputs)}")
        for value in self._graph.inputs:
            tensor, axes = inputs[str(value.name)], tuple(value.shape or ())
            fits = len(axes) == tensor.ndim and all(
                not isinstance(axis, int) or axis == size for axis, size in zip(axes, tensor.shape, strict=True)
            )
            if value.dtype is None or tensor.dtype != to_torch_dtype(value.dtype) or not fits:
                raise ValueError(
                    f"{value.name} is {tensor.dtype} {tuple(tensor.shape)}; the graph needs {value.dtype} {axes}"
                )


def shared(array: NDArray[Any]) -> Tensor:
    """Return a tensor that shares the memory of an array; torch cannot read NumPy's bfloat16 itself."""
    if array.dtype == ir.DataType.BFLOAT16.numpy():
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _weight(stored: ir.TensorProtocol | None) -> Tensor:
    assert stored is not None
    return shared(np.array(stored.numpy()))


def _computed(node: ir.Node, operands: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Return the outputs of a node that are not workspace."""
    if node.op_type == "Gemm":
        x, weight = operands
        assert x is not None
        assert weight is not None
        return [functional.linear(x.float(), weight.float()).to(x.dtype)]
    declared = _NODES[node.op_type]
    absent = [None] * (len(declared.inputs) - len(operands))
    results = REFERENCES[node.op_type](*operands, *absent, **dict(_attributes(declared, node)))
    return results if isinstance(results, tuple) else [results]


def _attributes(declared: Node, node: ir.Node) -> Iterator[tuple[str, Any]]:
    for attribute in declared.attributes:
        yield attribute.name, attribute.type(node.attributes[attribute.name].value)


Arrays = Mapping[str, NDArray[Any]]


class CudaStepper:
    """Decoder of a cuda graph set, and its encoder if it has one; the interface is NativeStepper's."""

    def __init__(self, encoder: CudaEvaluator | None, decoder: CudaEvaluator, config: ModelConfig) -> None:
        self._encoder = encoder
        self._decoder = decoder
        self._config = config

    def start(self, sources: Sequence[Ids], capacity: int) -> Callable[[Ids, Lens], Floats]:
        """Encode sources and return a function for steps of one token a row, as NativeStepper does."""
        sequences = self.encode(sources, capacity)
        return lambda ids, positions: self.step(sequences, np.split(ids, len(ids)), positions)

    def encode(self, sources: Sequence[Ids], capacity: int) -> Sequences:
        """Encode sources of any lengths in one packed batch, and reserve blocks for `capacity` target tokens each."""
        lens = np.array([len(source) if self._encoder else 0 for source in sources], np.int32)
        element, target_block = self._decoder.element.numpy(), target_block_size(self._config)
        sequences = reserve(lens, capacity, cuda_pool_axes(self._config), element, target_block)
        if self._encoder is not None:
            rows = np.repeat(np.arange(len(lens)), lens)
            feeds = {"rows": _padded(rows, 0), "tables": sequences.cross_tables, "cache": sequences.cache}
            self._encoder.run(_tensors({**packed_sources(sources), **feeds}))
        return sequences

    def step(self, sequences: Sequences, tokens: Sequence[Ids], starts: Lens) -> Floats:
        """Feed tokens[r] to each row r from position starts[r] on, as NativeStepper does."""
        counts = [len(row) for row in tokens]
        last = np.cumsum(counts) - 1
        positions = np.concatenate(
            [np.arange(start, start + len(row)) for start, row in zip(starts, tokens, strict=True)]
        )
        rows = np.repeat(np.arange(len(tokens)), counts)
        feeds = {
            "tokens": _padded(np.concatenate([[PREVIOUS - index, *row[1:]] for index, row in enumerate(tokens)]), 0),
            "positions": _padded(positions, PADDING),
            "rows": _padded(rows, 0),
            "self_lens": _padded(positions + 1, 0),
            "cross_lens": _padded(sequences.source_lens[rows], 0),
            "self_tables": sequences.self_tables,
            "cross_tables": sequences.cross_tables,
            "previous": np.array([row[0] for row in tokens], np.int32),
            "sample_positions": positions[last].astype(np.int32),
            "edit_rounds": np.zeros(0, np.int32),
            "candidates": np.zeros(self._config.vocab_size, np.int32),
            "cache": sequences.cache,
            **sampling_inputs(whole_vocabulary(last.astype(np.int32), self._config.vocab_size)),
        }
        outputs = self._decoder.run(_tensors({name: feeds[name] for name in self._decoder.input_names}))
        return listed_logprobs(**{name: output.numpy() for name, output in outputs.items()})


class CudaEncoder:
    """Encoder-only graphs of a cuda graph set, and its heads; the interface is NativeEncoder's."""

    def __init__(self, encoder: CudaEvaluator, heads: Mapping[Task, CudaEvaluator], config: ModelConfig) -> None:
        self._encoder = encoder
        self._heads = heads
        self._config = config

    def encode(self, sources: Sequence[Ids], types: Sequence[Ids] | None = None) -> list[Floats]:
        """Return float32 states [S, M] of each source [S], all encoded in one packed batch, as NativeEncoder does."""
        feeds = packed_sources(sources)
        if self._config.token_types:
            kinds = np.zeros(sum(map(len, sources)), np.int32) if types is None else np.concatenate(types)
            feeds["types"] = _padded(kinds, 0)
        memory = self._encoder.run(_tensors(feeds))["memory"].float().numpy()
        return np.split(memory[:-1], feeds["offsets"][1:-1])

    def read_out(self, task: Task, hidden: Floats) -> Floats:
        """Return the outputs [K, O] of a task's head for states [K, M], float32."""
        head = next(head for head in self._config.heads if head.task == task)
        (port,) = head_outputs(self._config, head)
        graph = self._heads[task]
        outputs = graph.run(_tensors({"hidden": hidden.astype(graph.element.numpy())}))["outputs"].float().numpy()
        width = port.axes[-1]
        assert isinstance(width, int)
        if outputs[:, width:].any():
            raise StepError(f"columns of {task} from {width} on are not 0")
        return outputs[:, :width]


def cuda_stepper(directory: Path, graphs: GraphSet, config: ModelConfig) -> CudaStepper:
    """Open the graphs of a model with a decoder."""
    encoder = None if graphs.encoder is None else CudaEvaluator(directory / graphs.encoder)
    return CudaStepper(encoder, CudaEvaluator(directory / graphs.decoder_file), config)


def cuda_encoder(directory: Path, graphs: GraphSet, config: ModelConfig) -> CudaEncoder:
    """Open the graphs of an encoder-only model."""
    heads = {task: CudaEvaluator(directory / name) for task, name in graphs.heads.items()}
    return CudaEncoder(CudaEvaluator(directory / graphs.encoder_file), heads, config)


def packed_sources(sources: Sequence[Ids]) -> dict[str, NDArray[Any]]:
    """Return the inputs that every encoder graph has."""
    tiles = [(index, first) for index, source in enumerate(sources) for first in range(0, len(source), TILE)]
    return {
        "tokens": _padded(np.concatenate(sources), 0),
        "positions": _padded(np.concatenate([np.arange(len(source)) for source in sources]), PADDING),
        "offsets": offsets_of([len(source) for source in sources]),
        "tiles": np.array([*tiles, (-1, 0)], np.int32),
    }


def _padded(numbers: NDArray[Any], padding: int) -> Lens:
    """Return numbers of tokens with that of a token of padding at the end."""
    return np.append(numbers, padding).astype(np.int32)


def _tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Return tensors that share the memory of the arrays."""
    return {name: shared(array) for name, array in arrays.items()}
