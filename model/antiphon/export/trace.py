"""Tracing of the PyTorch model into the graphs of its parts; ports.py declares their inputs and outputs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch
from torch import Tensor, nn

from antiphon.architecture.heads import Task
from antiphon.export.graph_edit import Editor, constant_array, take_over
from antiphon.export.packed import PackedEncoder, PackedHead, PackedStates, PagedDecoder
from antiphon.export.ports import (
    Port,
    decoder_inputs,
    decoder_outputs,
    encoder_inputs,
    encoder_outputs,
    head_inputs,
    head_outputs,
)
from antiphon.ops.operator import Operator, onnx_operator, torch_operator
from antiphon.ops.operators import OPERATORS
from antiphon.transformer.heads import Head
from antiphon.transformer.transformer import Transformer

OPSET = 23

# Sizes of the free axes. They are not 1, which the tracer would treat as a constant, and not equal, which it would
# treat as one axis.
_EXAMPLE_SIZES = {
    "tokens": 17, "rows": 5, "offsets": 6, "table": 8, "self_table": 9, "cross_table": 10, "num_blocks": 19,
    "samples": 4, "num_float_params": 20, "num_int_params": 21, "edit_offsets": 12, "edits": 14, "states": 15,
}  # fmt: skip


class _InPlace(nn.Module):
    """A module of the native lowering without its last output, the cache: the graph changes the cache in place."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        *outputs, _ = self.module(*tensors)
        return tuple(outputs)


class _Packed(nn.Module):
    """A module of the native lowering without a cache and with one output."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.module(*tensors)  # type: ignore[no-any-return]


def trace_encoder(model: Transformer) -> ir.Model:
    """Trace the encoder: sources to states, and with a decoder to keys and values of its layers in the pool."""
    module: nn.Module = _Packed(PackedStates(model)) if model.decoder is None else _InPlace(PackedEncoder(model))
    return _trace(module, encoder_inputs(model.config, "native"), encoder_outputs(model.config, "native"))


def trace_decoder(model: Transformer) -> ir.Model:
    """Trace the decoder: one step of every row, with caches that change in place."""
    module = _InPlace(PagedDecoder(model))
    return _trace(module, decoder_inputs(model.config, "native"), decoder_outputs(model.config, "native"))


def trace_head(model: Transformer, task: Task) -> ir.Model:
    """Trace a head of an encoder: states of the tokens that its task reads, to its outputs."""
    head = model.heads[task]
    assert isinstance(head, Head)
    inputs, outputs = head_inputs(model.config, head.config), head_outputs(model.config, head.config)
    return _trace(_Packed(PackedHead(head, model.config.norm_eps)), inputs, outputs)


def _trace(module: nn.Module, inputs: Sequence[Port], outputs: Sequence[Port]) -> ir.Model:
    module.eval()
    with quiet_exporter(), torch.no_grad():
        program = torch.onnx.export(
            module,
            tuple(port.example(_EXAMPLE_SIZES) for port in inputs),
            dynamo=True,
            input_names=[port.name for port in inputs],
            output_names=[port.name for port in outputs],
            dynamic_shapes=(tuple(_free_axes(port) for port in inputs),),
            custom_translation_table=TRANSLATIONS,
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    simplify_native(program.model)
    return program.model


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silence the exporter's warnings about packages that this project does not use; errors are still printed."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def _free_axes(port: Port) -> dict[int, str]:
    return {index: axis for index, axis in enumerate(port.axes) if isinstance(axis, str)}


def simplify(model: ir.Model) -> None:
    """Apply every pass of this module in place."""
    fold_transposes(model.graph)
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


def translation(operator: Operator) -> Callable[..., Any]:
    """Return the function that the exporter calls for each call of the operator in the traced graph."""
    node = onnx_operator(operator)
    flags = [attribute.name for attribute in operator.attributes if attribute.type is bool]

    def translate(*operands: Any, **attributes: Any) -> Any:
        attributes |= {name: int(attributes[name]) for name in flags}
        results = node(*operands, **attributes)
        if not operator.updated_inputs:
            return results
        outputs = results if isinstance(results, tuple | list) else (results,)
        return (*outputs, *(operands[index] for index in operator.updated_inputs))

    return translate


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch_operator(operator): translation(operator) for operator in OPERATORS
}
