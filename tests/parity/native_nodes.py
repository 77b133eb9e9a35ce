"""Single native operators, each in a separate graph that ONNX Runtime runs.

Inputs are named arrays in the operator's order; None omits an optional one. All sizes are dynamic, so one session
serves all shapes, and invalid shapes reach the operator's own checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper

from antiphon.bundle.session import native_session
from antiphon.export.bundle_model import run_native
from antiphon.export.weights import pack_float
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for, padded_width
from antiphon.ops.operator import DOMAIN
from antiphon.ops.operators import OPERATORS
from antiphon.ops.operators.attention import write_position
from antiphon.ops.workspace import LIBRARY

Array = NDArray[Any]
Inputs = Mapping[str, Array | None]

_ELEMENTS = {"float": TensorProto.FLOAT, "int32": TensorProto.INT32, "int64": TensorProto.INT64}
# Element types of the outputs, by name of the operator.
_OUTPUTS = {
    node.name: {output.name: _ELEMENTS[output.kind] for output in node.outputs}
    for operator in OPERATORS
    for node in operator.kernels()
}


def run_node(
    op_type: str, inputs: Inputs, *, threads: int = 1, library: Path = LIBRARY, **attributes: Any
) -> list[Array]:
    """Run the operator and return its outputs. A cache is changed in place."""
    kinds = tuple((name, None if array is None else (array.dtype.str, array.ndim)) for name, array in inputs.items())
    session = _session(op_type, kinds, tuple(attributes.items()), threads, library)
    return run_native(session, {name: array for name, array in inputs.items() if array is not None})


def attend(op_type: str, inputs: Inputs, *, threads: int = 1, **attributes: Any) -> Array:
    """Run an attention sublayer whose products are identities, on a residual of zeros; return its attention [N, H D].

    inputs: queries, or queries, keys and values, under the name qkv; then the sublayer's inputs after the norm.
    """
    (name, states), *others = inputs.items()
    assert states is not None
    width, attended = states.shape[1], states.shape[1] // (3 if name == "qkv" else 1)
    identity = np.eye(width, dtype=np.float32)
    arrays = {
        "x": states, "residual": np.zeros_like(states),
        f"{name}_weight": pack_float(identity), f"{name}_bias": None,
        "out_weight": pack_float(np.ascontiguousarray(identity[:, :attended])), "out_bias": None,
        "norm_weight": None, "norm_bias": None, **dict(others),
    }  # fmt: skip
    attributes |= {f"{name}_width": width, "epsilon": 1e-5, "kind": "rms"}
    total = run_node(op_type, arrays, threads=threads, **attributes)[1]
    return np.ascontiguousarray(total[:, :attended])


def gate(x: Array, activation: str) -> Array:
    """Run a gated feed-forward sublayer whose products are identities, on a residual of zeros: [N, 2 F] -> [N, F]."""
    width, gated = x.shape[1], x.shape[1] // 2
    identity = np.eye(width, dtype=np.float32)
    arrays = {
        "x": x, "residual": np.zeros_like(x), "inner_weight": pack_float(identity), "inner_bias": None,
        "outer_weight": pack_float(np.ascontiguousarray(identity[:, :gated])),
    }  # fmt: skip
    attributes = dict(activation=activation, gated=1, inner_width=width, epsilon=1e-5, kind="rms")
    return np.ascontiguousarray(run_node("FeedForwardSublayer", arrays, **attributes)[1][:, :gated])


@cache
def _session(
    op_type: str,
    kinds: tuple[tuple[str, tuple[str, int] | None], ...],
    attributes: tuple[tuple[str, Any], ...],
    threads: int,
    library: Path,
) -> Any:
    declared = []
    for name, kind in kinds:
        if kind is not None:
            element = helper.np_dtype_to_tensor_dtype(np.dtype(kind[0]))
            declared.append(helper.make_tensor_value_info(name, element, [f"{name}_{axis}" for axis in range(kind[1])]))
    outputs = _OUTPUTS[op_type]
    names = ["" if kind is None else name for name, kind in kinds]
    node = helper.make_node(op_type, names, list(outputs), domain=DOMAIN, **dict(attributes))
    described = [helper.make_tensor_value_info(name, element, None) for name, element in outputs.items()]
    graph = helper.make_graph([node], "single", declared, described)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return native_session(model.SerializeToString(), threads, library)


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng([*shape, seed]).standard_normal(shape, np.float32)


def ramp(counts: Sequence[int]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


class Pool:
    """Pool filled with NaN, block tables for sequences of these lengths, and the contents of their positions.

    lens: number of positions by sequence. spare_heads: heads of the pool behind those of the layers. Tables have one
    entry more than the longest sequence needs, and unused entries are out of range.
    """

    def __init__(
        self, lens: Sequence[int], heads: int, width: int, dtype: str, *, layers: int = 2, spare_heads: int = 0
    ) -> None:
        random = np.random.default_rng(len(lens))
        counts = [blocks_for(length) for length in lens]
        order = random.permutation(sum(counts) + 2).astype(np.int32)
        self.tables = np.full((len(lens), max(counts, default=0) + 1), -7, np.int32)
        used = iter(order)
        for row, count in zip(self.tables, counts, strict=True):
            row[:count] = [next(used) for _ in range(count)]
        shape = (len(order), layers, 2, heads + spare_heads, BLOCK_SIZE * padded_width(width))
        self.cache = np.full(shape, np.nan, dtype)
        self._heads, self._width = heads, width

    def hold(self, layer: int, lens: Sequence[int], seed: int = 5) -> None:
        """Write random keys and values at the first positions of every sequence."""
        random = np.random.default_rng(seed)
        for table, length in zip(self.tables.tolist(), lens, strict=True):
            for position in range(length):
                pair = random.standard_normal((2, self._heads, self._width), np.float32)
                key, value = torch.from_numpy(pair)
                write_position(torch.from_numpy(self.cache), layer, table, position, key, value)
