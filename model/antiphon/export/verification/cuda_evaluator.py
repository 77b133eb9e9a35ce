"""A cuda graph computed on the CPU, node by node, by the references of ops/cuda/references.py. For verification only.

Products are summed in float32 and rounded to the graph's element type, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.tensor_adapters import to_torch_dtype
from torch import Tensor
from torch.nn import functional

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
            given, axes = inputs[str(value.name)], tuple(value.shape or ())
            fits = len(axes) == given.ndim and all(
                not isinstance(axis, int) or axis == size for axis, size in zip(axes, given.shape, strict=True)
            )
            if value.dtype is None or given.dtype != to_torch_dtype(value.dtype) or not fits:
                raise ValueError(
                    f"{value.name} is {given.dtype} {tuple(given.shape)}; the graph needs {value.dtype} {axes}"
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
