"""Lowering `cuda`: rewrites a graph that trace.py wrote for the native lowering into one for an NVIDIA GPU.

The result has only products (ONNX `Gemm` without bias) and the nodes of ops/cuda/nodes.py, which take a product's bias
as an input. Weights get the element type of the graph: bfloat16, float16 or float32. Tables of score biases, slopes and
rotary angles stay float32.

Products over the vocabulary and those of a head's outputs get a multiple of 16 outputs, since products of odd widths
are slow on a GPU and kernels read whole vectors. The logits of the added tokens are -inf; the added outputs of a head
are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from antiphon.architecture.config import ModelConfig, Part
from antiphon.architecture.heads import Task
from antiphon.bundle.manifest import Precision
from antiphon.errors import LoweringError
from antiphon.export.cuda_graph import CudaGraph, State
from antiphon.export.graph_edit import constant_array, static_dim
from antiphon.export.ports import (
    decoder_inputs,
    decoder_outputs,
    encoder_inputs,
    encoder_outputs,
    head_inputs,
    head_outputs,
)
from antiphon.ops.cuda import nodes
from antiphon.ops.cuda.nodes import HEAD_WIDTHS, MAX_FLOAT32_HEAD_WIDTH, MAX_PARTS, VOCABULARY_PART
from antiphon.ops.operators import OPERATORS

MAX_VOCABULARY = MAX_PARTS * VOCABULARY_PART
_GRANULE = 16  # Kernels read vectors of 16 bytes or more, of elements of one or two bytes.
_ELEMENTS: Mapping[Precision, ir.DataType] = {
    "bfloat16": ir.DataType.BFLOAT16,
    "float16": ir.DataType.FLOAT16,
    "float32": ir.DataType.FLOAT,
}
_INPUT_NAMES = {operator.node_name: [port.name for port in operator.inputs] for operator in OPERATORS} | {
    "Gather": ["table", "indices"],
    "Add": ["x", "y"],
    "Mul": ["x", "y"],
    "Sigmoid": ["x"],
    "Slice": ["table", "starts", "ends", "axes", "steps"],
}


def check_config(config: ModelConfig, precision: Precision) -> None:
    """Raise LoweringError, which names the field, for a model that the kernels cannot compute."""
    for name in ("post_norms", "attention_cap", "output_cap"):
        if value := getattr(config, name):
            raise LoweringError(f"lowering='cuda' has no kernel for {name}={value}")
    if config.disentangled is not None:
        raise LoweringError("lowering='cuda' has no kernel for disentangled attention")
    if config.module_heads is not None:
        raise LoweringError("lowering='cuda' has no kernel for module_heads: a layer has all heads of the cache")
    is_limited = precision == "float32" and config.encoder_layers > 0
    widest = MAX_FLOAT32_HEAD_WIDTH if is_limited else HEAD_WIDTHS[-1]
    if config.resolved_head_dim > widest:
        raise LoweringError(
            f"lowering='cuda': head_dim={config.resolved_head_dim} must be at most {widest} in {precision}"
        )
    vocabulary = max(config.vocab_size, config.resolved_source_vocab_size)
    if vocabulary > MAX_VOCABULARY:
        raise LoweringError(f"lowering='cuda': a vocabulary of {vocabulary} is above the limit, {MAX_VOCABULARY}")
    widths = {
        "head_dim": config.resolved_head_dim,
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "d_ff of average": config.resolved_average.d_ff or 0,
        "embedding_width": config.resolved_embedding_width,
        **{f"transform_width of {head.task}": head.transform_width or 0 for head in config.heads},
        **{f"input_width of {head.task}": head.input_width or 0 for head in config.heads},
    }
    for name, width in widths.items():
        if width % _GRANULE:
            raise LoweringError(f"lowering='cuda': {name}={width} must be a multiple of {_GRANULE}")


def lower_for_cuda(traced: ir.Model, config: ModelConfig, part: Part | Task, precision: Precision) -> ir.Model:
    """Return the graph of one part of a model or of a head for a GPU; `traced` is not changed.

    precision: one of those of cuda graphs. Raises LoweringError for what the kernels cannot compute.
    """
    check_config(config, precision)
    if part == "encoder":
        inputs, outputs = encoder_inputs(config, "cuda", precision), encoder_outputs(config, "cuda", precision)
    elif part == "decoder":
        inputs, outputs = decoder_inputs(config, "cuda", precision), decoder_outputs(config, "cuda")
    else:
        head = next(head for head in config.heads if head.task == part)
        inputs, outputs = head_inputs(config, head, precision), head_outputs(config, head, "cuda", precision)
    rewriting = _Rewriting(traced.graph, CudaGraph(inputs, _ELEMENTS[precision]))
    for node in traced.graph:
        rewriting.rewrite(node)
    computed = rewriting.outputs()
    return rewriting.graph.finish({port.name: computed[port.name] for port in outputs}, outputs, traced)


class _Call:
    """One node of the traced graph: its inputs by name, and its attributes."""

    def __init__(self, node: ir.Node, folded: Mapping[ir.Value, ir.Value]) -> None:
        self.node = node
        inputs = [None if value is None else folded.get(value, value) for value in node.inputs]
        self._inputs = dict(zip(_INPUT_NAMES[node.op_type], inputs, strict=False))
        self._unread = {name for name, value in self._inputs.items() if constant_array(value) is not None}

    def optional(self, name: str) -> ir.Value | None:
        """Return an input, or None where it is absent."""
        self._unread.discard(name)
        return self._inputs.get(name)

    def operand(self, name: str) -> ir.Value:
        """Return an input that the node must have."""
        value = self.optional(name)
        assert value is not None, f"{self.node.op_type} has no {name}"
        return value

    def check_read(self) -> None:
        """Raise LoweringError if the node has weights that nobody asked for: the graph for a GPU would lack them."""
        if self._unread:
            names = ", ".join(sorted(self._unread))
            raise LoweringError(f"lowering='cuda' has no kernel for {names} of the node {self.node.op_type}")

    def attributes(self, *names: str) -> dict[str, Any]:
        """Return attributes by name."""
        return {name: self.node.attributes[name].value for name in names}


class _Rewriting:
    """One pass over the nodes of a traced graph, in their order."""

    def __init__(self, traced: ir.Graph, graph: CudaGraph) -> None:
        self.traced = traced
        self.graph = graph
        self._states: dict[ir.Value, State] = {}
        self._written: dict[str, ir.Value] = {}
        self._folded: dict[ir.Value, ir.Value] = {}  # parts of weights that the traced graph computes
        self._gates: dict[ir.Value, State] = {}  # products whose sigmoid is a factor
        self._gated: dict[ir.Value, tuple[State, ir.Value]] = {}  # terms of a gated sum: gate and other factor
        # The vectors of token types, which CudaEmbed adds.
        self._types = next((node.outputs[0] for node in traced if node.op_type == "Gather"), None)
        self._handlers: Mapping[str, Callable[[_Call], Sequence[State]]] = {
            "Embed": self._embed,
            "Gather": self._gather,
            "Slice": self._slice,
            "Add": self._add,
            "Sigmoid": self._sigmoid,
            "Mul": self._multiply,
            "Linear": self._linear,
            "AddNorm": self._add_norm,
            "PackedAttentionSublayer": self._packed_attention_sublayer,
            "PagedSelfAttentionSublayer": self._paged_self_attention_sublayer,
            "PagedCrossAttentionSublayer": self._paged_cross_attention_sublayer,
            "SsruSublayer": self._ssru_sublayer,
            "PagedAverage": self._paged_average,
            "FeedForwardSublayer": self._feed_forward_sublayer,
            "PagedWrite": self._paged_write,
            "Sample": self._sample,
        }

    def rewrite(self, node: ir.Node) -> None:
        """Add the nodes for one node of the traced graph. Raises LoweringError for a node that has no counterpart."""
        handler = self._handlers.get(node.op_type)
        if handler is None:
            raise LoweringError(f"lowering='cuda' has no kernel for the node {node.op_type} {node.name}")
        call = _Call(node, self._folded)
        self._states.update(zip(node.outputs, handler(call), strict=False))
        call.check_read()

    def outputs(self) -> dict[str, ir.Value]:
        """Return the computed outputs by name."""
        named = {str(value.name): self._states[value] for value in self.traced.outputs}
        return {name: self.graph.plain(state) for name, state in named.items()} | self._written

    def _state(self, call: _Call, name: str) -> State:
        """Return an input that is a computed value, or the input of a head."""
        value = call.operand(name)
        return State(self.graph.inputs[str(value.name)]) if value.is_graph_input() else self._states[value]

    def _plain(self, call: _Call, name: str) -> ir.Value:
        return self.graph.plain(self._state(call, name))

    def _embed(self, call: _Call) -> Sequence[State]:
        named: dict[str, ir.Value | None] = {
            "tokens": self.graph.inputs["tokens"],
            "positions": self.graph.inputs["positions"],
            "weight": self.graph.weight(call.operand("weight"), fill=0),
            "position_table": self.graph.optional_weight(call.optional("position_table")),
        }
        if "previous" in self.graph.inputs:
            named["previous"] = self.graph.inputs["previous"]
        if self._types is not None and (gather := self._types.producer()) is not None:
            table = self.graph.weight(_Call(gather, self._folded).operand("table"))
            named |= {"types": self.graph.inputs["types"], "type_table": table}
        return [State(self.graph.add(nodes.EMBED, named, **call.attributes("scale"))[0])]

    def _gather(self, call: _Call) -> Sequence[State]:
        """Return nothing: CudaEmbed reads the table of token types."""
        call.operand("table")
        return ()

    def _slice(self, call: _Call) -> Sequence[State]:
        """Keep a part of a table: that of positions, without the rows before the first token."""
        starts, ends, axes, steps = (constant_array(call.operand(name)) for name in _INPUT_NAMES["Slice"][1:])
        table = constant_array(call.operand("table"))
        if table is None or axes is None or starts is None or ends is None or axes.tolist() != [0] or steps != [1]:
            raise LoweringError(f"lowering='cuda' has no kernel for the node Slice {call.node.name}")
        part = table[int(starts[0]) : int(ends[0])]
        name = f"{call.operand('table').name}.part"
        self._folded[call.node.outputs[0]] = ir.Value(
            name=name, shape=ir.Shape(part.shape), const_value=ir.tensor(part)
        )
        return ()

    def _add(self, call: _Call) -> Sequence[State]:
        """Return embedded tokens, which have the vectors of their types already, or a gated sum."""
        operands = [call.operand("x"), call.operand("y")]
        if self._types in operands:
            operands.remove(self._types)
            return [self._states[operands[0]]]
        if not self._gated.keys() >= set(operands):
            raise LoweringError(f"lowering='cuda' has no kernel for the node Add {call.node.name}")
        (x_gate, x), (y_gate, y) = (self._gated[operand] for operand in operands)
        named = {"x": x, "x_gate": x_gate.value, "x_bias": x_gate.bias}
        named |= {"y": y, "y_gate": y_gate.value, "y_bias": y_gate.bias}
        return [State(self.graph.add(nodes.GATED_SUM, named)[0])]

    def _sigmoid(self, call: _Call) -> Sequence[State]:
        """Return nothing: CudaGatedSum computes it."""
        self._gates[call.node.outputs[0]] = self._state(call, "x")
        return ()

    def _multiply(self, call: _Call) -> Sequence[State]:
        """Return nothing: CudaGatedSum computes it."""
        if (gate := self._gates.get(call.operand("x"))) is None:
            raise LoweringError(f"lowering='cuda' has no kernel for the node Mul {call.node.name}")
        self._gated[call.node.outputs[0]] = gate, self._plain(call, "y")
        return ()

    def _linear(self, call: _Call) -> Sequence[State]:
        fill = 0 if call.node.outputs[0].is_graph_output() else None
        weight = self.graph.weight(call.operand("weight"), fill=fill)
        product = self.graph.product(self._plain(call, "x"), weight)
        state = State(product, self.graph.optional_weight(call.optional("bias"), fill=fill))
        activation = call.attributes("activation")["activation"]
        return [state if activation == "none" else State(self.graph.activate(state, activation=activation))]

    def _project(self, call: _Call, prefix: str, x: ir.Value) -> State:
        """Add the product of a sublayer with this prefix in the names of weight and bias."""
        product = self.graph.product(x, self.graph.weight(call.operand(f"{prefix}_weight")))
        return State(product, self.graph.optional_weight(call.optional(f"{prefix}_bias")))

    def _add_norm(self, call: _Call) -> Sequence[State]:
        residual = call.optional("residual")
        is_added = residual is not None and residual is not self._types
        names = {"weight": "weight", "norm_bias": "bias"}
        return self._normed(call, self._state(call, "x"), self._plain(call, "residual") if is_added else None, names)

    def _end(self, call: _Call, prefix: str, states: ir.Value) -> Sequence[State]:
        """Add a sublayer's last product, the residual sum and the norm after it."""
        return self._normed_sum(call, self._project(call, prefix, states))

    def _normed_sum(self, call: _Call, x: State) -> Sequence[State]:
        """Add a sublayer's residual sum and the norm after it."""
        names = {"weight": "norm_weight", "norm_bias": "norm_bias"}
        return self._normed(call, x, self._plain(call, "residual"), names)

    def _normed(self, call: _Call, x: State, residual: ir.Value | None, names: Mapping[str, str]) -> Sequence[State]:
        named = {name: self.graph.optional_weight(call.optional(own)) for name, own in names.items()}
        outputs = self.graph.add(
            nodes.ADD_NORM,
            {"x": x.value, "bias": x.bias, "residual": residual, **named},
            **call.attributes("epsilon", "kind"),
        )
        return [State(output) for output in outputs]

    def _feed_forward_sublayer(self, call: _Call) -> Sequence[State]:
        inner = self._project(call, "inner", self._plain(call, "x"))
        return self._end(call, "outer", self.graph.activate(inner, **call.attributes("activation", "gated")))

    def _project_rotated(self, call: _Call) -> State:
        """Add the product to queries, keys and values, and their rotation where the sublayer has a table for it."""
        qkv = self._project(call, "qkv", self._plain(call, "x"))
        if (table := call.optional("rotary_table")) is None:
            return qkv
        named = {
            "qkv": qkv.value,
            "bias": qkv.bias,
            "positions": self.graph.inputs["positions"],
            "table": self.graph.table(table),
        }
        return State(self.graph.add(nodes.ROTARY, named, **call.attributes("num_heads"))[0])

    def _packed_attention_sublayer(self, call: _Call) -> Sequence[State]:
        qkv = self._project_rotated(call)
        named = {"qkv": qkv.value, "bias": qkv.bias, **self._named("offsets", "tiles"), **self._score_bias(call)}
        attributes = call.attributes("num_heads", "scale", "causal")
        (attended,) = self.graph.add(nodes.PACKED_ATTENTION, named, **attributes)
        return self._end(call, "out", attended)

    def _paged_self_attention_sublayer(self, call: _Call) -> Sequence[State]:
        qkv = self._project_rotated(call)
        tables = self.graph.inputs["self_tables"]
        named = {"kv": qkv.value, "bias": qkv.bias, "tables": tables, **self._named("cache", "rows", "positions")}
        (written,) = self.graph.add(nodes.PAGED_WRITE, named, **call.attributes("num_heads", "layer"))
        more = {"written": written, **self._score_bias(call)}
        return self._end(call, "out", self._attended(call, qkv, "self", more))

    def _paged_cross_attention_sublayer(self, call: _Call) -> Sequence[State]:
        query = self._project(call, "query", self._plain(call, "x"))
        return self._end(call, "out", self._attended(call, query, "cross", {}))

    def _attended(self, call: _Call, query: State, side: str, more: Mapping[str, ir.Value | None]) -> ir.Value:
        """Add the attention over the blocks of one side of the cache."""
        named = {
            "query": query.value,
            "bias": query.bias,
            **self._named("cache", "rows"),
            "tables": self.graph.inputs[f"{side}_tables"],
            "lengths": self.graph.inputs[f"{side}_lens"],
            **more,
        }
        return self.graph.add(nodes.PAGED_ATTENTION, named, **call.attributes("num_heads", "scale", "layer"))[0]

    def _ssru_sublayer(self, call: _Call) -> Sequence[State]:
        gates = self._project(call, "gates", self._plain(call, "x"))
        return self._normed_sum(call, self._recurrence(call, nodes.SSRU, {"gates": gates.value, "bias": gates.bias}))

    def _paged_average(self, call: _Call) -> Sequence[State]:
        return [self._recurrence(call, nodes.PAGED_AVERAGE, {"x": self._plain(call, "x")})]

    def _recurrence(self, call: _Call, node: nodes.CudaNode, operands: Mapping[str, ir.Value | None]) -> State:
        """Add a node that changes the states in the cache."""
        tables = self.graph.inputs["self_tables"]
        named = {**operands, "tables": tables, **self._named("cache", "rows", "positions")}
        return State(self.graph.add(node, named, **call.attributes("layer"))[0])

    def _paged_write(self, call: _Call) -> Sequence[State]:
        kv = self._state(call, "kv")
        named = {"kv": kv.value, "bias": kv.bias, **self._named("cache", "tables", "rows", "positions")}
        attributes = call.attributes("num_heads", "layer")
        (written,) = self.graph.add(nodes.PAGED_WRITE, named, **attributes)
        self._written[f"written.{attributes['layer']}"] = written
        return [State(written)]

    def _sample(self, call: _Call) -> Sequence[State]:
        hidden = {"hidden": self._plain(call, "hidden"), **self._named("picks")}
        (picked,) = self.graph.add(nodes.PICK, hidden)
        weight = self.graph.weight(call.operand("weight"), fill=0)
        params = [port.name for port in nodes.SAMPLE.inputs[3:]]
        named = {
            "logits": self.graph.product(picked, weight),
            "bias": self._logits_bias(call, static_dim(weight, 0)),
            "positions": self.graph.inputs["sample_positions"],
            **self._named(*params),
        }
        return [State(output) for output in self.graph.add(nodes.SAMPLE, named)]

    def _logits_bias(self, call: _Call, width: int) -> ir.Value | None:
        """Return the bias of the logits, which forbids the tokens that were added to the vocabulary."""
        if (bias := call.optional("bias")) is not None:
            return self.graph.weight(bias, fill=-np.inf)
        vocab_size = static_dim(call.operand("weight"), 0)
        if vocab_size == width:
            return None
        numbers = np.zeros(width, np.float32)
        numbers[vocab_size:] = -np.inf
        return self.graph.constant("added_tokens", numbers)

    def _named(self, *names: str) -> dict[str, ir.Value]:
        """Return inputs of the graph that a node reads under their own names."""
        return {name: self.graph.inputs[name] for name in names}

    def _score_bias(self, call: _Call) -> dict[str, ir.Value | None]:
        return {name: self.graph.table(call.optional(name)) for name in ("bias_table", "slopes")}
