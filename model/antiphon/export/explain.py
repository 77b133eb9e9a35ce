"""The explain graph, which takes a source and a target and returns the attention weights of every head.

It is the model's own forward pass in float32 with a recorder of attention weights. It shares the stored weights of the
bundle's other graphs, and unpacks integers in the graph.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.explain_session import ExplainSession, explain_inputs
from antiphon.bundle.manifest import Precision
from antiphon.errors import VerificationError
from antiphon.export.graph_edit import Editor, constant_array, operand, shape_of, take_over
from antiphon.export.packed import RelativeTables, relative_tables
from antiphon.export.quantize import quantize_rows
from antiphon.export.trace import OPSET, forget_shapes, quiet_exporter, simplify
from antiphon.export.weights import PANEL, pack_float, pack_int8
from antiphon.transformer.layers import EncoderLayer
from antiphon.transformer.recorder import Kind, record_weights
from antiphon.transformer.transformer import Encoder, Transformer

_FLOAT = int(ir.DataType.FLOAT)
_TOKEN_IDS = ("source_ids", "target_ids")  # token types are embedded too, by a table that is not packed

# Sizes of the free axes. They are not 1, which the tracer would treat as a constant, and not equal, which it would
# treat as one axis.
_EXAMPLE_LENS = {"source": 7, "target": 11}
_AXES = {"source_ids": "source", "type_ids": "source", "target_ids": "target"}

# Largest difference of an attention weight, which is 0 to 1. float32 is summed in another order, as in verify.py.
TOLERANCE = 1e-4
_CASES = ((1, 1), (9, 4), (33, 17))


class ExplainModule(nn.Module):
    """Forward pass that returns the attention weights only: a Transformer with a recorder; shares its parameters."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        self.config = model.config
        self._recorded: dict[str, list[Tensor]] = {}
        if (encoder := self.model.encoder) is not None and encoder.relative_positions is not None:
            _keep_tables_constant(encoder, model.config.max_source_len)
        record_weights(self.model, self._record)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the maps in the order of their names. tensors: inputs of bundle/explain_session.py, in their order."""
        return tuple(self.maps(*tensors).values())

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs of `forward`."""
        config = self.config
        is_there = {
            "encoder_self": config.encoder_layers > 0,
            "decoder_self": config.decoder_layers > 0 and config.decoder_self == "attention",
            "cross": config.architecture == "encoder-decoder",
        }
        return [name for name, is_recorded in is_there.items() if is_recorded]

    def maps(self, *tensors: Tensor) -> dict[str, Tensor]:
        """Return the attention weights of one source and target by name.

        encoder_self [L, H, S, S], decoder_self [Ld, H, T, T] and cross [Ld, H, T, S] float32; a model of one part has
        the maps of this part, and a decoder without self-attention no decoder_self. The weights of a query sum to 1;
        masked keys have weight 0.
        """
        ids = dict(zip(explain_inputs(self.config), tensors, strict=True))
        self._recorded.clear()
        cross_kv = None
        if "source_ids" in ids:
            memory = self.model.encode(ids["source_ids"], None, ids.get("type_ids"))
            cross_kv = self.model.project_memory(memory) if "target_ids" in ids else None
        if "target_ids" in ids:
            self.model.decode(ids["target_ids"], cross_kv)
        return {name: torch.cat(self._recorded[name]) for name in self.output_names}

    def _record(self, kind: Kind, weights: Tensor) -> None:
        self._recorded.setdefault("cross" if kind == "decoder_cross" else kind, []).append(weights)


def _keep_tables_constant(encoder: Encoder, max_len: int) -> None:
    """Replace the tables of disentangled attention by constants: no product computes them, no precision rounds them."""
    layers = [tables for tables in relative_tables(encoder, max_len) if isinstance(tables, RelativeTables)]
    attentions = [layer.self_attention for layer in encoder.layers if isinstance(layer, EncoderLayer)]
    for attention, tables in zip(attentions, layers, strict=True):
        attention.relative = _ConstantProjections(tables)  # type: ignore[assignment]
    encoder.relative_positions = _ConstantRows(layers[0])  # type: ignore[assignment]


class _ConstantProjections(nn.Module):
    """In place of PositionProjections."""

    def __init__(self, tables: RelativeTables) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, table: Tensor, qkv: nn.Linear) -> tuple[Tensor | None, Tensor | None]:
        return self.tables.keys, self.tables.queries


class _ConstantRows(nn.Module):
    """In place of RelativePositions, without its table, which the constant projections do not read."""

    def __init__(self, tables: RelativeTables) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length)
        distance = positions[:, None] - positions  # query minus key
        return self.tables.rows, self.tables.rows[distance + len(self.tables.rows) // 2].long()


def trace_explain(model: Transformer) -> ir.Model:
    """Return the explain graph in float32; its products read constants [K, O]."""
    module, names = ExplainModule(model).eval(), explain_inputs(model.config)
    examples = tuple(torch.zeros(1, _EXAMPLE_LENS[_AXES[name]], dtype=torch.int64) for name in names)
    with quiet_exporter(), torch.no_grad():
        program = torch.onnx.export(
            module,
            examples,
            dynamo=True,
            input_names=names,
            output_names=module.output_names,
            dynamic_shapes=(tuple({1: _AXES[name]} for name in names),),
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    simplify(program.model)
    forget_shapes(program.model.graph)
    return program.model


def verify_explain(path: Path, model: Transformer, precision: Precision, *, seed: int = 0) -> float:
    """Compare an explain graph with PyTorch in float32, weights rounded as in the graph; returns the largest error.

    Raises VerificationError when an attention weight is off by more than TOLERANCE.
    """
    reference = rounded(ExplainModule(model), precision)
    session = ExplainSession(path)
    random = np.random.default_rng(seed)
    worst = max(_error(session, reference, lens, random) for lens in _CASES)
    if not worst <= TOLERANCE:
        raise VerificationError(
            f"{path.name} disagrees with the model: an attention weight is off by {worst:.1e}, "
            f"at most {TOLERANCE:.0e} is allowed"
        )
    return worst


def _error(
    session: ExplainSession, reference: ExplainModule, lens: tuple[int, int], random: np.random.Generator
) -> float:
    """Return the largest difference over all maps, or nan, for a random source and target of these lengths."""
    ids = _random_ids(reference.config, lens, random)
    maps = session.run(**{name: row.tolist() for name, row in ids.items()})
    with torch.no_grad():
        expected = reference.maps(*(torch.from_numpy(row)[None] for row in ids.values()))
    return float(np.max([np.abs(maps[name] - wanted.numpy()).max() for name, wanted in expected.items()]))


def _random_ids(
    config: ModelConfig, lens: tuple[int, int], random: np.random.Generator
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """Return random ids of the graph's inputs by name, for a source and target of these lengths at most."""
    source_len, target_len = min(lens[0], config.max_source_len), min(lens[1], config.max_target_len)
    sizes = {
        "source_ids": (config.resolved_source_vocab_size, source_len),
        "type_ids": (config.token_types, source_len),
        "target_ids": (config.vocab_size, target_len),
    }
    return {name: random.integers(0, *sizes[name]) for name in explain_inputs(config)}


@torch.no_grad()
def rounded(module: ExplainModule, precision: Precision) -> ExplainModule:
    """Return a copy whose products and token embeddings are rounded as the precision stores them (quantize.py).

    Token types and the tables of disentangled attention are stored in float32 at every precision.
    """
    result = deepcopy(module).eval()
    if precision == "float32":
        return result
    encoder = result.model.encoder
    kept = encoder.token_types if encoder is not None else None
    parts = [part for part in result.modules() if isinstance(part, nn.Linear | nn.Embedding) and part is not kept]
    weights: set[Tensor] = {part.weight for part in parts}
    for weight in weights:
        integers, scales = quantize_rows(weight.numpy())
        weight.copy_(torch.from_numpy(integers * scales[:, None]))
    return result


def store_packed(model: ir.Model, precision: Precision) -> None:
    """Change an explain graph in place so that it reads weights as the bundle's other graphs store them.

    A product's constant is replaced by the packed tensor, and by plain ONNX nodes that compute [K, O] float32 from it:
    [Op / 16, K, 16] float32, or s8 [Op / 16, Kp / 4, 16, 4] and scales [Op] (weights.py). Only those rows of an
    embedding are unpacked that are read. WeightsFile then finds that the tensors are already stored.

    Axes: O outputs (V of an embedding), K inputs (M of an embedding), N ids.
    """
    work = _Unpacker(model.graph, precision)
    for node in list(model.graph):
        weight = constant_array(node.inputs[1]) if node.op_type == "MatMul" else None
        if weight is not None and weight.ndim == 2:  # tables of disentangled attention are multiplied too
            node.replace_input_with(1, work.product(node, weight))
        elif node.op_type == "Gather" and operand(node, 1).name in _TOKEN_IDS:
            table = constant_array(node.inputs[0])
            assert table is not None, f"{node.name}: embeddings are constants"
            take_over(node.outputs[0], work.embedding(node, table))
            model.graph.remove(node, safe=True)
    common_passes.RemoveUnusedNodesPass()(model)


class _Unpacker:
    """One pass over one graph that replaces weights by their stored form."""

    def __init__(self, graph: ir.Graph, precision: Precision) -> None:
        self.edit = Editor(graph)
        self.precision = precision

    def product(self, node: ir.Node, weight: NDArray[np.float32]) -> ir.Value:
        """Return the [K, O] float32 that `node` reads, computed from the stored form of weight [K, O]."""
        inputs, outputs = weight.shape
        if self.precision == "float32":
            packed = self.edit.constant(pack_float(weight.T))
            rows = self._reshaped(node, self._transposed(node, packed, 1, 0, 2), inputs, -1)
            return self._first(node, rows, outputs, axis=1, num_entries=-outputs % PANEL + outputs)
        stored = pack_int8(weight.T)
        depth, width = stored.integers.shape[1] * stored.integers.shape[3], len(stored.scales)
        rows = self._transposed(node, self.edit.constant(stored.integers), 1, 3, 0, 2)
        rows = self._first(node, self._reshaped(node, rows, depth, width), inputs, axis=0, num_entries=depth)
        return self._first(node, self._dequantized(node, rows, stored.scales), outputs, axis=1, num_entries=width)

    def embedding(self, node: ir.Node, table: NDArray[np.float32]) -> ir.Value:
        """Return the rows [1, N, M] float32 that `node` gathers, computed from the stored form of table [V, M]."""
        ids, width = operand(node, 1), table.shape[1]
        if self.precision == "float32":
            return self._from_panels(node, self.edit.constant(pack_float(table)), ids)
        stored = pack_int8(table)
        groups = self._from_panels(node, self.edit.constant(stored.integers), ids)  # [1, N, Kp / 4, 4]
        depth = stored.integers.shape[1] * stored.integers.shape[3]
        rows = self._first(node, self._reshaped(node, groups, 1, -1, depth), width, axis=2, num_entries=depth)
        return self._scaled(node, rows, stored.scales, ids)

    def _from_panels(self, node: ir.Node, packed: ir.Value, ids: ir.Value) -> ir.Value:
        """Gather the lane of each id from its panel: packed [Vp / 16, x, 16, ..] -> [1, N, x, ..]."""
        panel = self.edit.constant(np.array(PANEL, np.int64))
        panels = self.edit.emit(node, "Gather", [packed, self.edit.emit(node, "Div", [ids, panel])])
        panels = self._transposed(node, panels, 0, 1, 3, 2, *range(4, len(shape_of(packed)) + 1))  # [1, N, 16, x, ..]
        lanes = self.edit.emit(node, "Unsqueeze", [self.edit.emit(node, "Mod", [ids, panel]), self.edit.ints(-1)])
        return self.edit.emit(node, "GatherND", [panels, lanes], {"batch_dims": 2})

    def _scaled(self, node: ir.Node, rows: ir.Value, scales: NDArray[np.float32], ids: ir.Value) -> ir.Value:
        """Multiply integers [1, N, M] by the scale of each id."""
        steps = self.edit.emit(node, "Gather", [self.edit.constant(scales), ids])
        steps = self.edit.emit(node, "Unsqueeze", [steps, self.edit.ints(-1)])
        return self.edit.emit(node, "Mul", [self.edit.emit(node, "Cast", [rows], {"to": _FLOAT}), steps])

    def _dequantized(self, node: ir.Node, integers: ir.Value, scales: NDArray[np.float32]) -> ir.Value:
        return self.edit.emit(node, "DequantizeLinear", [integers, self.edit.constant(scales)], {"axis": 1})

    def _transposed(self, node: ir.Node, value: ir.Value, *axes: int) -> ir.Value:
        return self.edit.emit(node, "Transpose", [value], {"perm": list(axes)})

    def _reshaped(self, node: ir.Node, value: ir.Value, *shape: int) -> ir.Value:
        return self.edit.emit(node, "Reshape", [value, self.edit.ints(*shape)])

    def _first(self, node: ir.Node, value: ir.Value, size: int, *, axis: int, num_entries: int) -> ir.Value:
        """Return the first `size` of `num_entries` entries along an axis, without those that packing added."""
        if size == num_entries:
            return value
        return self.edit.emit(node, "Slice", [value, self.edit.ints(0), self.edit.ints(size), self.edit.ints(axis)])
