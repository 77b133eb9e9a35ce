"""Tracing of the PyTorch model into the graphs of its parts, with the module that each lowering needs.

graph_ports.py declares the inputs and outputs. Writes no file and compares nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import onnx_ir as ir
import torch
from torch import Tensor, nn

from antiphon.architecture.heads import Task
from antiphon.bundle.graph_ports import (
    Port,
    decoder_inputs,
    decoder_outputs,
    encoder_inputs,
    encoder_outputs,
    head_inputs,
    head_outputs,
)
from antiphon.bundle.manifest import Lowering
from antiphon.export.graphs.contrib_lowering import LOWERINGS
from antiphon.export.graphs.native_graph import PackedEncoder, PackedHead, PackedStates, PagedDecoder
from antiphon.export.graphs.simplify import simplify, simplify_native
from antiphon.export.graphs.translation import TRANSLATIONS
from antiphon.ops.attention import Backend
from antiphon.transformer.heads import Head
from antiphon.transformer.layers import KV
from antiphon.transformer.transformer import Transformer

OPSET = 23

# Sizes of the free axes. They are not 1, which the tracer would treat as a constant, and not equal, which it would
# treat as one axis.
_EXAMPLE_SIZES = {
    "batch": 3, "source": 7, "target_capacity": 11, "source_capacity": 13,
    "tokens": 17, "rows": 5, "offsets": 6, "table": 8, "self_table": 9, "cross_table": 10, "num_blocks": 19,
    "samples": 4, "num_float_params": 20, "num_int_params": 21, "edit_offsets": 12, "edits": 14, "states": 15,
}  # fmt: skip


class _EncoderGraph(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (input_ids,) = tensors
        cross_kv = self.model.project_memory(self.model.encode(input_ids))
        return tuple(tensor for pair in cross_kv for tensor in pair)


class _DecoderGraph(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        input_ids, past_lens, source_lens, *caches = tensors
        pairs: list[KV] = list(zip(caches[0::2], caches[1::2], strict=True))
        layers = self.model.config.decoder_layers
        hidden, present = self.model.step(input_ids, past_lens, pairs[:layers], pairs[layers:], source_lens)
        return (self.model.logits(hidden.squeeze(1)), *(tensor for pair in present for tensor in pair))


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


def trace_encoder(model: Transformer, lowering: Lowering) -> ir.Model:
    """Trace the encoder: source ids to keys and values of every decoder layer, or to states if there is no decoder."""
    if lowering == "native":
        module: nn.Module = _Packed(PackedStates(model)) if model.decoder is None else _InPlace(PackedEncoder(model))
    else:
        module = _EncoderGraph(traceable(model, lowering))
    return _trace(module, encoder_inputs(model.config, lowering), encoder_outputs(model.config, lowering), lowering)


def trace_decoder(model: Transformer, lowering: Lowering) -> ir.Model:
    """Trace the decoder: one step of every row, with caches as inputs and outputs, or changed in place."""
    if lowering == "native":
        module: nn.Module = _InPlace(PagedDecoder(model))
    else:
        module = _DecoderGraph(traceable(model, lowering))
    return _trace(module, decoder_inputs(model.config, lowering), decoder_outputs(model.config, lowering), lowering)


def trace_head(model: Transformer, task: Task) -> ir.Model:
    """Trace a head of an encoder, native: states of the tokens that its task reads, to its outputs."""
    head = model.heads[task]
    assert isinstance(head, Head)
    inputs, outputs = head_inputs(model.config, head.config), head_outputs(model.config, head.config)
    return _trace(_Packed(PackedHead(head, model.config.norm_eps)), inputs, outputs, "native")


def traceable(model: Transformer, lowering: Lowering) -> Transformer:
    """Return the model with the attention that the lowering traces and the same weights."""
    backend: Backend = "fused" if lowering == "contrib" else "eager"
    with torch.random.fork_rng(devices=[]):
        copy = Transformer(model.config, attention_backend=backend)
    copy.load_state_dict(model.state_dict())
    return copy.eval()


def _trace(module: nn.Module, inputs: Sequence[Port], outputs: Sequence[Port], lowering: Lowering) -> ir.Model:
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
    if lowering == "native":
        simplify_native(program.model)
        return program.model
    if lowering == "contrib":
        LOWERINGS["CPUExecutionProvider"](program.model.graph)
    simplify(program.model)
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
