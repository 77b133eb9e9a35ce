"""Layouts of weights for the native operators: packing and unpacking, and the pass that packs the weights of a graph,
quantised or not.

A panel holds 16 outputs side by side, so that one vector holds the weights of one input for 16 outputs:

    float32  [O, K] -> [Op / 16, K, 16]
    int8     [O, K] -> [Op / 16, Kp / 4, 16, 4], four inputs of an output adjacent (as u8 x s8 products read them),
             with a scale for each output, and the sum of its integers, which corrects for the zero point
    int4     [O, K] -> [Op / 16, Kp / 8, 16, 4], eight inputs of an output in four bytes, the first four in the lower
             nibbles; each 32 inputs of an output share a scale, a float16 times the output's own. Products only:
             embeddings are int8, and so is the product over the vocabulary, which can share their weight

Op is O rounded up to 16, Kp is K rounded up to 64; the padding is zero. An embedding has the layout of the product that
it can be tied to, so that both share one tensor.

Axes: O outputs (V of an embedding), K inputs (M of an embedding).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
from numpy.typing import NDArray

from antiphon.bundle.manifest import Precision
from antiphon.export.graph_edit import Editor, constant_array, take_over
from antiphon.export.quantize import GROUP, quantize_groups, quantize_rows
from antiphon.ops.operator import DOMAIN, Operator
from antiphon.ops.operators import OPERATORS

PANEL = 16
DEPTH = 64
_GROUP = 4

Floats = NDArray[np.float32]
_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedWeight:
    """integers s8 [Op / 16, Kp / 4, 16, 4], scales [Op] float32, column_sums [Op] int32."""

    integers: NDArray[np.int8]
    scales: Floats
    column_sums: NDArray[np.int32]


def pack_float(weight: Floats) -> Floats:
    """Pack [O, K] into [Op / 16, K, 16]."""
    panels = _padded(weight, PANEL, 1).reshape(-1, PANEL, weight.shape[1])
    return np.ascontiguousarray(panels.swapaxes(1, 2))


def unpack_float(packed: Floats, outputs: int) -> Floats:
    """Invert `pack_float`."""
    return np.ascontiguousarray(packed.swapaxes(1, 2).reshape(-1, packed.shape[1])[:outputs])


def pack_int8(weight: Floats) -> QuantizedWeight:
    """Quantise [O, K] float32 row by row (quantize.py) and pack it."""
    integers, scales = quantize_rows(weight)
    padded = _padded(integers, PANEL, DEPTH)
    groups = padded.reshape(-1, PANEL, padded.shape[1] // _GROUP, _GROUP)
    return QuantizedWeight(
        integers=np.ascontiguousarray(groups.swapaxes(1, 2)),
        scales=_padded(scales[:, None], PANEL, 1)[:, 0],
        column_sums=padded.sum(axis=1, dtype=np.int32),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NibbleWeight:
    """nibbles s8 [Op / 16, Kp / 8, 16, 4], ratios [Op / 16, Kp / 32, 16] float16, scales, offsets [Op] float32.

    A weight is integer * 16 ratio * scale; offsets are sums of integer * 16 ratio, which correct for the zero point.
    """

    nibbles: NDArray[np.int8]
    ratios: NDArray[np.float16]
    scales: Floats
    offsets: Floats


def pack_int4(weight: Floats) -> NibbleWeight:
    """Quantise [O, K] float32 in groups (quantize.py) and pack it."""
    groups = quantize_groups(weight)
    padded = _padded(groups.integers, PANEL, DEPTH)
    ratios = _padded(groups.ratios, PANEL, DEPTH // GROUP)
    panels = len(padded) // PANEL
    steps = padded.reshape(panels, PANEL, -1, 2, _GROUP)
    nibbles = (steps[:, :, :, 0] & 15) | (steps[:, :, :, 1] << 4)
    sums = padded.reshape(len(padded), -1, GROUP).sum(axis=2, dtype=np.int32) * 16.0
    return NibbleWeight(
        nibbles=np.ascontiguousarray(nibbles.swapaxes(1, 2)),
        ratios=np.ascontiguousarray(ratios.reshape(panels, PANEL, -1).swapaxes(1, 2)),
        scales=_padded(groups.scales[:, None] / np.float32(16), PANEL, 1)[:, 0],
        offsets=(sums * ratios.astype(np.float64)).sum(axis=1).astype(np.float32),
    )


def unpack_int4(nibbles: NDArray[np.int8], outputs: int, inputs: int) -> NDArray[np.int8]:
    """Return the integers [O, K] of a packed weight."""
    steps = nibbles.swapaxes(1, 2)  # [panels, 16, Kp / 8, 4]
    unpacked = np.stack([steps << 4 >> 4, steps >> 4], axis=3)
    rows = unpacked.reshape(len(nibbles) * PANEL, -1)
    return np.ascontiguousarray(rows[:outputs, :inputs])


def unpack_int8(integers: NDArray[np.int8], outputs: int, inputs: int) -> NDArray[np.int8]:
    """Return the integers [O, K] of a packed weight."""
    panels, groups = integers.shape[:2]
    rows = integers.swapaxes(1, 2).reshape(panels * PANEL, groups * _GROUP)
    return np.ascontiguousarray(rows[:outputs, :inputs])


def unpack_weight(parts: Sequence[NDArray[Any]], precision: Precision, outputs: int, inputs: int) -> Floats:
    """Return the weight [O, K] float32 that the parts of a packed weight represent: integer * scale of each number.

    parts: inputs of the node in place of the weight, as in ops/operators/packed_weights.py; sums are not read.
    """
    if precision == "float32":
        return unpack_float(parts[0], outputs)
    scales: Floats
    if precision == "int8":
        integers, scales = unpack_int8(parts[0], outputs, inputs), parts[1]
        return integers * scales[:outputs, None]
    nibbles, ratios, scales = parts[:3]
    of_groups = ratios.swapaxes(1, 2).reshape(-1, ratios.shape[1])[:outputs]  # [O, Kp / 32]
    steps = (of_groups.astype(np.float32) * 16 * scales[:outputs, None]).repeat(GROUP, axis=1)
    return unpack_int4(nibbles, outputs, inputs) * steps[:, :inputs]


def _padded(matrix: NDArray[_Number], rows: int, columns: int) -> NDArray[_Number]:
    """Append zeros until the numbers of rows and columns are multiples of these numbers."""
    extra = [(0, -size % multiple) for size, multiple in zip(matrix.shape, (rows, columns), strict=True)]
    return np.pad(matrix, extra) if any(behind for _, behind in extra) else matrix


Outliers = Mapping[int, NDArray[np.int32]]
"""Inputs of a product that stay float32, in rising order, by the address of its weight [O, K]."""
NO_OUTLIERS: Outliers = MappingProxyType({})

_WITH_WEIGHT = {operator.node_name: operator for operator in OPERATORS if operator.weights}


def pack_weights(model: ir.Model, precision: Precision, outliers: Outliers = NO_OUTLIERS) -> None:
    """Pack every weight of a native graph in place; for integer weights, use the quantised operators."""
    work = _Packer(model.graph, precision, outliers)
    for node in list(model.graph):
        if node.domain == DOMAIN and node.op_type in _WITH_WEIGHT:
            work.replace(node, _WITH_WEIGHT[node.op_type])
    common_passes.RemoveUnusedNodesPass()(model)


class _Packer:
    """One pass over one graph; a weight that several operators read is packed once."""

    def __init__(self, graph: ir.Graph, precision: Precision, outliers: Outliers) -> None:
        self.outliers = outliers
        self.edit = Editor(graph)
        self.precision = precision
        self.packed: dict[tuple[int, tuple[int, ...], str], tuple[ir.Value, ...]] = {}

    def replace(self, node: ir.Node, operator: Operator) -> None:
        """Replace an operator that reads weights [O, K] by the one that reads the packed weights."""
        precision = self.precision if operator.packed_node(self.precision) is not None else "int8"
        packed = operator.packed_node(precision)
        assert packed is not None
        weights = {weight.name: weight for weight in operator.weights}
        attributes = {key: attribute.value for key, attribute in node.attributes.items()}
        inputs: list[ir.Value | None] = []
        kept: list[ir.Value | None] = []
        for port, value in zip(operator.inputs, node.inputs, strict=False):
            if port.name not in weights:
                inputs.append(value)
                continue
            array = constant_array(value)
            assert array is not None, f"{node.op_type} {node.name}: {port.name} is not a constant"
            weight = weights[port.name]
            inputs += self._packed(value, array, precision)[: len(weight.parts[precision])]
            kept += self._outliers(value, array, len(weight.outlier_inputs(precision)))
            attributes.update(zip(weight.sizes, array.shape, strict=False))
        if any(value is not None for value in kept):
            inputs += [None] * (len(operator.inputs) - len(node.inputs)) + kept
        outputs = self.edit.emit_many(node, packed.name, inputs, attributes, len(node.outputs), domain=DOMAIN)
        for old, new in zip(node.outputs, outputs, strict=True):
            take_over(old, new)
        self.edit.graph.remove(node, safe=True)

    def _outliers(self, value: ir.Value | None, array: Floats, count: int) -> Sequence[ir.Value | None]:
        """Return the `count` inputs for a weight's outliers: columns and their weights, or None."""
        columns = self.outliers.get(array.ctypes.data)
        if not count or columns is None or not len(columns):
            return (None,) * count
        key = (array.ctypes.data, array.shape, "outliers")
        if key not in self.packed:
            name = "weight" if value is None or value.name is None else value.name
            self.packed[key] = (
                self.edit.constant(columns, f"{name}.outlier_inputs"),
                self.edit.constant(pack_float(np.ascontiguousarray(array[:, columns])), f"{name}.outlier_weight"),
            )
        return self.packed[key]

    def _packed(self, value: ir.Value | None, array: Floats, precision: Precision) -> tuple[ir.Value, ...]:
        """Return the inputs that represent a weight; tied weights can be several initialisers of one tensor."""
        key = (array.ctypes.data, array.shape, precision)
        if key not in self.packed:
            assert value is not None
            self.packed[key] = _pack(self.edit, array, value.name or "weight", precision)
        return self.packed[key]


def _pack(edit: Editor, weight: Floats, name: str, precision: Precision) -> tuple[ir.Value, ...]:
    """Return the inputs that represent a weight at a precision."""
    if precision == "float32":
        # Each weight is packed when it is written, so that a model's weights are not in memory twice.
        shape = (-(-weight.shape[0] // PANEL), weight.shape[1], PANEL)
        return (edit.computed_constant(lambda: pack_float(weight), shape, f"{name}.packed"),)
    if precision == "int4":
        quantised = pack_int4(weight)
        return (
            edit.constant(quantised.nibbles, f"{name}.nibbles"),
            edit.constant(quantised.ratios, f"{name}.ratios"),
            edit.constant(quantised.scales, f"{name}.nibble_scales"),
            edit.constant(quantised.offsets, f"{name}.offsets"),
        )
    packed = pack_int8(weight)
    return (
        edit.constant(packed.integers, f"{name}.packed"),
        edit.constant(packed.scales, f"{name}.scales"),
        edit.constant(packed.column_sums, f"{name}.sums"),
    )


_ALIGNMENT = 64
# Smaller tensors stay in the graph. Shapes and axes must, since the runtime reads them before external data.
_SMALLEST_BYTES = 256


class WeightsFile:
    """File that collects the tensors of several models."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[bytes, int] = {}
        self._stream = path.open("wb")

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def save(self, model: ir.Model, path: Path) -> None:
        """Write the model to `path` and move its large tensors to this file, to which the model then refers."""
        for value in model.graph.initializers.values():
            if value.const_value is not None and value.const_value.nbytes >= _SMALLEST_BYTES:
                value.const_value = self._moved(value.const_value)
        self._stream.flush()
        ir.save(model, path)

    def _moved(self, tensor: ir.TensorProtocol) -> ir.ExternalTensor:
        # No copy, since it can be a gigabyte. As bytes, since bfloat16 is a type that a buffer cannot have.
        raw = np.ascontiguousarray(tensor.numpy()).view(np.uint8).data
        digest = hashlib.sha256(raw).digest()
        if digest not in self._offsets:
            self._stream.write(b"\0" * (-self._stream.tell() % _ALIGNMENT))
            self._offsets[digest] = self._stream.tell()
            self._stream.write(raw)
        return ir.ExternalTensor(
            self._path.name,
            self._offsets[digest],
            raw.nbytes,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=tensor.name or "",
            base_dir=self._path.parent,
        )
