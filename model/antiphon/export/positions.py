"""Export of the learned tables of positions, which a server describes: a graph of constants, without inputs.

The tables are those that the other graphs read, so a bundle stores most of them once. Writes no file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import nn

from antiphon.bundle.position_tables import read_position_tables
from antiphon.errors import VerificationError
from antiphon.export.trace import OPSET
from antiphon.transformer.transformer import Stack, Transformer

Floats = NDArray[np.float32]

_IR_VERSION = 10


def position_graph(model: Transformer) -> ir.Model | None:
    """Return the graph of a model's learned tables of positions; None if it has none."""
    tables = position_tables(model)
    if not tables:
        return None
    values = [_constant(name, table) for name, table in tables.items()]
    graph = ir.Graph([], values, nodes=[], initializers=values, opset_imports={"": OPSET}, name="positions")
    return ir.Model(graph, ir_version=_IR_VERSION)


@torch.no_grad()
def position_tables(model: Transformer) -> dict[str, Floats]:
    """Return the learned tables by name, see bundle/position_tables.py; empty if there are none."""
    config = model.config
    stacks = (("encoder", model.encoder, config.max_source_len), ("decoder", model.decoder, config.max_target_len))
    tables: dict[str, Floats] = {}
    for part, stack, max_len in stacks:
        if stack is not None:
            tables |= _tables_of(stack, part, max_len)
    if model.encoder is not None and (relative := model.encoder.relative_positions) is not None:
        vectors, _ = relative(1)
        rows = relative.by_distance(config.max_source_len).flip(0)  # from query minus key to key minus query
        tables["encoder_distances"] = vectors[rows.long()].numpy()
    return tables


def _tables_of(stack: Stack, part: str, max_len: int) -> dict[str, Floats]:
    tables: dict[str, Floats] = {}
    if isinstance(stack.positions.table, nn.Parameter):
        assert stack.positions.vectors is not None
        tables[f"{part}_positions"] = stack.positions.vectors.numpy()
    biases = stack.relative_bias.by_distance(min(stack.relative_bias.max_distance, max_len))
    if biases is not None:
        tables[f"{part}_biases"] = biases.numpy()
    return tables


def _constant(name: str, table: Floats) -> ir.Value:
    tensor = ir.tensor(np.ascontiguousarray(table), name=name)
    return ir.Value(name=name, shape=ir.Shape(table.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)


def verify_positions(path: Path, model: Transformer) -> None:
    """Raise VerificationError unless a graph has exactly the model's learned tables of positions."""
    tables, expected = read_position_tables(path), position_tables(model)
    if tables.keys() != expected.keys() or any(not np.array_equal(tables[name], expected[name]) for name in expected):
        raise VerificationError(f"{path.name} disagrees with the model: a table of positions differs")
