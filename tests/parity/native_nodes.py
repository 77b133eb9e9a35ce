"""Single native operators, each in a separate graph that ONNX Runtime runs.

With ANTIPHON_ARM_KERNELS, by `make test-arm`, the graphs run on an emulated 64-bit Arm with these kernels.

Inputs are named arrays in the operator's order; None omits an optional one. All sizes are dynamic, so one session
serves all shapes, and invalid shapes reach the operator's own checks.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from antiphon.bundle.session import native_session
from antiphon.export.bundle_model import run_native
from antiphon.export.weights import pack_float
from antiphon.ops.operator import DOMAIN
from antiphon.ops.operators import OPERATORS
from antiphon.ops.workspace import LIBRARY
from tests.arm.emulator import emulated_nodes

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
    op_type: str,
    inputs: Inputs,
    *,
    constants: Collection[str] = (),
    threads: int = 1,
    library: Path = LIBRARY,
    **attributes: Any,
) -> list[Array]:
    """Run the operator and return its outputs. A cache is changed in place.

    constants: names of the inputs that are initializers, as weights are in a bundle.
    """
    kinds = tuple((name, None if array is None else (array.dtype.str, array.ndim)) for name, array in inputs.items())
    given = {name: array for name, array in inputs.items() if array is not None}
    fed = {name: array for name, array in given.items() if name not in constants}
    held = {name: array for name, array in given.items() if name in constants}
    described = (op_type, kinds, tuple(attributes.items()))
    model = _model(*described, held) if held else _cached_model(*described)
    if kernels := os.environ.get("ANTIPHON_ARM_KERNELS"):
        return emulated_nodes(kernels).run(model, threads, fed)
    return run_native((native_session if held else _cached_session)(model, threads, library), fed)


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


def _model(
    op_type: str,
    kinds: tuple[tuple[str, tuple[str, int] | None], ...],
    attributes: tuple[tuple[str, Any], ...],
    constants: Mapping[str, Array] = MappingProxyType({}),
) -> bytes:
    declared = []
    for name, kind in kinds:
        if kind is not None and name not in constants:
            element = helper.np_dtype_to_tensor_dtype(np.dtype(kind[0]))
            declared.append(helper.make_tensor_value_info(name, element, [f"{name}_{axis}" for axis in range(kind[1])]))
    outputs = _OUTPUTS[op_type]
    names = ["" if kind is None else name for name, kind in kinds]
    node = helper.make_node(op_type, names, list(outputs), domain=DOMAIN, **dict(attributes))
    described = [helper.make_tensor_value_info(name, element, None) for name, element in outputs.items()]
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph([node], "single", declared, described, initializers)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    serialized: bytes = model.SerializeToString()
    return serialized


_cached_model = cache(_model)
_cached_session = cache(native_session)
