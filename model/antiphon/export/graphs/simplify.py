"""Passes that make an exported graph cheaper to run without changing its results.

They fold constant transposes, merge a residual sum and the bias before it into one Sum, and order nodes and drop shapes
so that the runtime holds less memory.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from antiphon.export.graphs.graph_edit import Editor, constant_array, operand, take_over


def simplify(model: ir.Model) -> None:
    """Apply every pass of this module in place."""
    fold_transposes(model.graph)
    sum_residuals(model.graph)
    common_passes.RemoveUnusedNodesPass()(model)
    common_passes.CommonSubexpressionEliminationPass()(model)
    common_passes.ClearMetadataAndDocStringPass()(model)


def simplify_native(model: ir.Model) -> None:
    """Apply the passes that a graph of the native lowering needs, in place; its operators need no change."""
    drop_unread_outputs(model.graph)
    write_early(model.graph)
    forget_shapes(model.graph)
    common_passes.ClearMetadataAndDocStringPass()(model)


def drop_unread_outputs(graph: ir.Graph) -> None:
    """Remove trailing outputs that nothing reads, so that operators do not write them."""
    for node in graph:
        outputs = list(node.outputs)
        while len(outputs) > 1 and not (outputs[-1].consumers() or outputs[-1].is_graph_output()):
            outputs.pop()
        node.resize_outputs(len(outputs))


def write_early(graph: ir.Graph) -> None:
    """Move the writes of the encoder's keys and values to the end, so that each runs right after its product.

    ONNX Runtime orders nodes backwards from the last one, and among a node's producers it visits the latest in the
    file first. If each write follows its product in the file, it computes the products of all layers before the first
    write and keeps them in memory: 26 KiB a token for a Transformer base, instead of 12 KiB.
    """
    for node in [node for node in graph if node.op_type == "PagedWrite"]:
        graph.remove(node)
        graph.append(node)


def forget_shapes(graph: ir.Graph) -> None:
    """Remove the shapes of intermediate tensors; those of the graph's inputs and outputs stay.

    Where ONNX Runtime sees that two tensors have the same shape, it gives them one buffer and keeps it from the first
    to the last of them, also while it is unused: 20 KiB a token for a Transformer base, of which 12 KiB are in use.
    """
    for node in graph:
        for value in node.outputs:
            if not value.is_graph_output():
                value.shape = value.type = None


def fold_transposes(graph: ir.Graph) -> None:
    """Replace every transposed constant by a constant, stored as products read it."""
    edit = Editor(graph)
    for node in list(graph):
        weight = constant_array(node.inputs[0]) if node.op_type == "Transpose" else None
        if weight is not None:
            permuted = np.ascontiguousarray(weight.transpose(node.attributes["perm"].as_ints()))
            take_over(node.outputs[0], edit.constant(permuted))
            graph.remove(node, safe=True)


def sum_residuals(graph: ir.Graph) -> None:
    """Replace skip + (update + bias) by Sum(update, bias, skip).

    This saves a node, and it hides the Add that ONNX Runtime would fuse with the norm after it. On its CPU provider
    SkipLayerNormalization takes 350 us for 256 rows of 256; the sums and LayerNormalization together take 52 us.
    """
    edit = Editor(graph)
    for node in list(graph):
        if node.op_type == "Add" and _adds_equals(node):
            skip, update = operand(node, 0), operand(node, 1)
            terms = [update, skip]
            inner = update.producer()
            if inner is not None and _adds_bias(inner) and len(update.consumers()) == 1:
                terms = [operand(inner, 0), operand(inner, 1), skip]
            take_over(node.outputs[0], edit.emit(node, "Sum", terms))
            graph.remove(node, safe=True)


def _adds_equals(node: ir.Node) -> bool:
    left, right = operand(node, 0), operand(node, 1)
    computed = constant_array(left) is None and constant_array(right) is None
    return computed and left.dtype == ir.DataType.FLOAT and left.shape is not None and left.shape == right.shape


def _adds_bias(node: ir.Node) -> bool:
    bias = constant_array(node.inputs[1]) if node.op_type == "Add" else None
    return bias is not None and bias.ndim == 1
