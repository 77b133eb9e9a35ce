"""From the PyTorch model to its encoder and decoder graphs: what goes in and out, as data, and how it is traced.

The names and axes here are the contract of `bundle.GraphSet`. Writes no file and compares nothing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import onnx_ir as ir
import torch
from torch import Tensor, nn

from antiphon.model.attention import Backend
from antiphon.model.bundle import Lowering
from antiphon.model.config import ModelConfig
from antiphon.model.ops.contrib_lowering import LOWERINGS
from antiphon.model.ops.onnx_translation import TRANSLATIONS
from antiphon.model.ops.simplify import simplify
from antiphon.model.transformer import KV, Transformer

OPSET = 23


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """One tensor of a graph: its name, element type, and axes, a string where the size is free."""

    name: str
    dtype: torch.dtype
    axes: tuple[int | str, ...]

    def example(self, sizes: dict[str, int]) -> Tensor:
        """A tensor of ones (valid as id, length and number) with the free axes sized."""
        return torch.ones([axis if isinstance(axis, int) else sizes[axis] for axis in self.axes], dtype=self.dtype)


# Free axes never have size 1 or equal sizes while tracing: the tracer would take them for constants, or for one.
_EXAMPLE_SIZES = {"batch": 3, "source": 7, "target_capacity": 11, "source_capacity": 13}


def cache_ports(config: ModelConfig, side: str, capacity: str, prefix: str) -> list[Port]:
    """Key and value caches of every decoder layer: side `decoder` (self attention) or `encoder` (cross)."""
    axes = ("batch", config.num_heads, capacity, config.resolved_head_dim)
    return [
        Port(name=f"{prefix}.{layer}.{side}.{half}", dtype=torch.float32, axes=axes)
        for layer in range(config.decoder_layers)
        for half in ("key", "value")
    ]


def encoder_inputs(config: ModelConfig) -> list[Port]:
    """What the encoder graph takes."""
    return [Port(name="input_ids", dtype=torch.int64, axes=("batch", "source"))]


def encoder_outputs(config: ModelConfig) -> list[Port]:
    """What the encoder graph gives: the source's keys and values for each decoder layer."""
    return cache_ports(config, "encoder", "source", "present")


def decoder_inputs(config: ModelConfig) -> list[Port]:
    """What one decoder step takes."""
    return [
        Port(name="input_ids", dtype=torch.int64, axes=("batch", 1)),
        Port(name="past_lens", dtype=torch.int32, axes=("batch",)),
        Port(name="source_lens", dtype=torch.int32, axes=("batch",)),
        *cache_ports(config, "decoder", "target_capacity", "past_key_values"),
        *cache_ports(config, "encoder", "source_capacity", "past_key_values"),
    ]


def decoder_outputs(config: ModelConfig) -> list[Port]:
    """What one decoder step gives: logits of the next token, and the self caches, grown in place."""
    logits = Port(name="logits", dtype=torch.float32, axes=("batch", config.vocab_size))
    return [logits, *cache_ports(config, "decoder", "target_capacity", "present")]


class _EncoderGraph(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        (input_ids,) = tensors
        cross_kv = self.model.project_memory(self.model.encode(input_ids))
        return tuple(half for pair in cross_kv for half in pair)


class _DecoderGraph(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        input_ids, past_lens, source_lens, *caches = tensors
        pairs: list[KV] = list(zip(caches[0::2], caches[1::2], strict=True))
        layers = self.model.config.decoder_layers
        hidden, present = self.model.step(input_ids, past_lens, pairs[:layers], pairs[layers:], source_lens)
        return (self.model.logits(hidden.squeeze(1)), *(half for pair in present for half in pair))


def trace_encoder(model: Transformer, lowering: Lowering) -> ir.Model:
    """The encoder graph: source ids to the cross-attention keys and values of every decoder layer."""
    config = model.config
    return _trace(_EncoderGraph(traceable(model, lowering)), encoder_inputs(config), encoder_outputs(config), lowering)


def trace_decoder(model: Transformer, lowering: Lowering) -> ir.Model:
    """The decoder graph: one step of every row, caches in and out."""
    config = model.config
    return _trace(_DecoderGraph(traceable(model, lowering)), decoder_inputs(config), decoder_outputs(config), lowering)


def traceable(model: Transformer, lowering: Lowering) -> Transformer:
    """The same weights behind the attention that the lowering traces; buffers and parameters are shared, not copied."""
    backend: Backend = "fused" if lowering == "contrib" else "eager"
    with torch.random.fork_rng(devices=[]):
        twin = Transformer(model.config, attention_backend=backend)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def _trace(module: nn.Module, inputs: Sequence[Port], outputs: Sequence[Port], lowering: Lowering) -> ir.Model:
    module.eval()
    with _quiet_exporter(), torch.no_grad():
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
    if lowering == "contrib":
        LOWERINGS["CPUExecutionProvider"](program.model.graph)
    simplify(program.model)
    return program.model


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    """The exporter warns about packages that this project does not use, on standard error; errors still show."""
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
