"""Passes that shorten an exported graph without changing what it computes.

Constant transposes are folded; a residual sum and the norm behind it become one node.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from antiphon.model.ops.graph_edit import Editor, constant_array, operand, optional_operand, take_over

CONTRIB = "com.microsoft"
_FUSED_NORMS = {
    "LayerNormalization": "SkipLayerNormalization",
    "RMSNormalization": "SkipSimplifiedLayerNormalization",
}


def simplify(graph: ir.Graph) -> None:
    """Apply every pass of this module in place."""
    fold_transposes(graph)
    fuse_residual_norms(graph)
    model = ir.Model(graph, ir_version=10)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.CommonSubexpressionEliminationPass()(model)


def fold_transposes(graph: ir.Graph) -> None:
    """Store weights the way products read them: a transposed constant becomes a constant."""
    edit = Editor(graph)
    for node in list(graph):
        weight = constant_array(node.inputs[0]) if node.op_type == "Transpose" else None
        if weight is not None:
            permuted = np.ascontiguousarray(weight.transpose(node.attributes["perm"].as_ints()))
            take_over(node.outputs[0], edit.constant(permuted))
            graph.remove(node, safe=True)


def fuse_residual_norms(graph: ir.Graph) -> None:
    """norm(x + (y + bias)) -> one operator of com.microsoft, which gives the sum too where something else reads it."""
    edit = Editor(graph)
    for norm in list(graph):
        if norm.op_type in _FUSED_NORMS and (added := _sum_of_two(norm.inputs[0])) is not None:
            _fuse(edit, norm, added)
            graph.opset_imports[CONTRIB] = 1


def _sum_of_two(value: ir.Value | None) -> ir.Node | None:
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Add" or any(constant_array(operand) is not None for operand in node.inputs):
        return None
    shapes = [operand.shape for operand in node.inputs if operand is not None]
    return node if len(shapes) == 2 and shapes[0] is not None and shapes[0] == shapes[1] else None


def _fuse(edit: Editor, norm: ir.Node, added: ir.Node) -> None:
    skip, update = operand(added, 0), operand(added, 1)
    bias: ir.Value | None = None
    inner = update.producer()
    if inner is not None and inner.op_type == "Add" and _is_vector(inner.inputs[1]) and len(update.consumers()) == 1:
        update, bias = operand(inner, 0), operand(inner, 1)
    beta = [optional_operand(norm, 2)] if norm.op_type == "LayerNormalization" else []
    outputs = edit.emit_many(
        added,
        _FUSED_NORMS[norm.op_type],
        [update, skip, operand(norm, 1), *beta, bias],
        {"epsilon": norm.attributes["epsilon"].as_float()},
        4 if len(added.outputs[0].consumers()) > 1 else 1,
        domain=CONTRIB,
    )
    take_over(norm.outputs[0], outputs[0])
    edit.graph.remove(norm, safe=True)
    if len(outputs) > 1:
        take_over(added.outputs[0], outputs[3])
    edit.graph.remove(added, safe=True)


def _is_vector(value: ir.Value | None) -> bool:
    array = constant_array(value)
    return array is not None and array.ndim == 1
