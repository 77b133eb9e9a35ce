"""Inputs and outputs of a bundle's graphs as data: names, element types and axes for every lowering.

This is the contract of `manifest.GraphSet` in the form that the exporter and the steppers need.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import HeadConfig
from antiphon.bundle.manifest import Lowering, Precision
from antiphon.ops.cache_geometry import cuda_pool_axes, padded_width, pool_axes
from antiphon.ops.sampling import FLOAT_PARAMS, INT_PARAMS

_ELEMENTS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """One input or output of a graph: name, element type and axes; an axis of free size is a string."""

    name: str
    dtype: torch.dtype
    axes: tuple[int | str, ...]

    def shape(self, sizes: dict[str, int]) -> list[int]:
        """Return the sizes of all axes; `sizes` gives those of the free axes."""
        return [axis if isinstance(axis, int) else sizes[axis] for axis in self.axes]

    def example(self, sizes: dict[str, int]) -> Tensor:
        """Return a tensor of ones (a valid id, length and number); `sizes` gives the sizes of the free axes."""
        return torch.ones(self.shape(sizes), dtype=self.dtype)


def encoder_inputs(config: ModelConfig, lowering: Lowering, precision: Precision = "float32") -> list[Port]:
    """Return the inputs of the encoder graph; only those of cuda graphs depend on the precision."""
    if lowering == "cuda":
        return _cuda_encoder_inputs(config, precision)
    packed = [_ids("input_ids", "tokens"), _ints("positions", "tokens"), _ints("offsets", "offsets")]
    if config.architecture == "encoder":
        return [*packed, _ids("type_ids", "tokens")] if config.token_types else packed
    return [*packed, _ints("block_tables", "rows", "table"), pool_port(config)]


def encoder_outputs(config: ModelConfig, lowering: Lowering, precision: Precision = "float32") -> list[Port]:
    """Return the outputs of the encoder graph; only those of cuda graphs depend on the precision.

    The encoder's states, and with a decoder also the number of written tokens; cuda graphs have one such output for
    each layer.
    """
    if lowering == "cuda":
        written = [_ints(f"written.{layer}", 1) for layer in range(config.decoder_layers)]
        return [_elements(precision, "memory", "tokens", config.d_model), *written]
    memory = _floats("memory", "tokens", config.d_model)
    return [memory] if config.architecture == "encoder" else [_ints("written", 1), memory]


def head_inputs(config: ModelConfig, head: HeadConfig, precision: Precision = "float32") -> list[Port]:
    """Return the inputs of a head's graph: states of the tokens that its task uses, for embed pooled states."""
    return [_elements(precision, "hidden", "states", config.head_input_width(head))]


def head_outputs(
    config: ModelConfig, head: HeadConfig, lowering: Lowering = "native", precision: Precision = "float32"
) -> list[Port]:
    """Return the outputs of a head's graph; in a cuda graph their number is rounded up to 16."""
    width = config.vocab_size if head.task == "fill_mask" else len(head.labels) or head.transform_width or 0
    return [_elements(precision, "outputs", "states", padded_width(width) if lowering == "cuda" else width)]


def decoder_inputs(config: ModelConfig, lowering: Lowering, precision: Precision = "float32") -> list[Port]:
    """Return the inputs of the decoder graph for one step; only those of cuda graphs depend on the precision."""
    if lowering == "cuda":
        return _cuda_decoder_inputs(config, precision)
    return _paged_decoder_inputs(config)


def decoder_outputs(config: ModelConfig, lowering: Lowering) -> list[Port]:
    """Return the outputs of the decoder graph for one step: sampled tokens and log-probabilities."""
    if lowering == "cuda":
        return [
            _ints("token_ids", "samples"),
            _floats("logprobs", "samples"),
            _ints("top_ids", "samples", "top"),
            _floats("top_logprobs", "samples", "top"),
            _floats("top_scores", "samples", "top"),
        ]
    return [
        _ids("token_ids", "samples"),
        _floats("logprobs", "samples"),
        _ids("top_ids", "samples", "top"),
        _floats("top_logprobs", "samples", "top"),
        _floats("top_scores", "samples", "top"),
    ]


def pool_port(config: ModelConfig) -> Port:
    """Return the pool of cache blocks (ops/cache_pool.py), traced as float32.

    The exporter changes the type afterwards if the bundle's cache is float16.
    """
    return _floats("cache", "num_blocks", *pool_axes(config))


def _paged_decoder_inputs(config: ModelConfig) -> list[Port]:
    return [
        _ids("input_ids", "tokens"),
        _ints("positions", "tokens"),
        _ints("offsets", "offsets"),
        _ints("self_tables", "rows", "self_table"),
        _ints("cross_tables", "rows", "cross_table"),
        _ints("source_lens", "rows"),
        pool_port(config),
        _ints("picks", "samples"),
        _floats("float_params", "samples", "num_float_params"),
        _ids("int_params", "samples", "num_int_params"),
        _ints("edit_offsets", "edit_offsets"),
        _ints("edit_ids", "edits"),
        _floats("edit_values", "edits", 3),
    ]


def _cuda_encoder_inputs(config: ModelConfig, precision: Precision) -> list[Port]:
    packed = [
        _ints("tokens", "tokens"),
        _ints("positions", "tokens"),
        _ints("offsets", "offsets"),
        _ints("tiles", "tiles", 2),
    ]
    if config.architecture == "encoder":
        return [*packed, _ints("types", "tokens")] if config.token_types else packed
    return [*packed, _ints("rows", "tokens"), _ints("tables", "sources", "table"), _cuda_pool(config, precision)]


def _cuda_decoder_inputs(config: ModelConfig, precision: Precision) -> list[Port]:
    has_sources = config.architecture == "encoder-decoder"
    return [
        _ints("tokens", "tokens"),
        _ints("positions", "tokens"),
        _ints("rows", "tokens"),
        _ints("self_lens", "tokens"),
        *([_ints("cross_lens", "tokens")] if has_sources else []),
        _ints("self_tables", "rows", "self_table"),
        *([_ints("cross_tables", "rows", "cross_table")] if has_sources else []),
        _ints("previous", "rows"),
        _ints("picks", "samples"),
        _ints("sample_positions", "samples"),
        _floats("float_params", "samples", len(FLOAT_PARAMS)),
        _ids("int_params", "samples", len(INT_PARAMS)),
        _ints("edit_offsets", "edit_offsets"),
        _ints("edit_ids", "edits"),
        _ints("edit_rounds", "edits"),
        _floats("edit_values", "edits", 3),
        _ints("candidates", "top"),
        _cuda_pool(config, precision),
    ]


def _cuda_pool(config: ModelConfig, precision: Precision) -> Port:
    return _elements(precision, "cache", "num_blocks", *cuda_pool_axes(config))


def _elements(precision: Precision, name: str, *axes: int | str) -> Port:
    """Return a port of the element type of cuda graphs of this precision; float32 in all others."""
    return Port(name=name, dtype=_ELEMENTS.get(precision, torch.float32), axes=axes)


def _ids(name: str, *axes: int | str) -> Port:
    return Port(name=name, dtype=torch.int64, axes=axes)


def _ints(name: str, *axes: int | str) -> Port:
    return Port(name=name, dtype=torch.int32, axes=axes)


def _floats(name: str, *axes: int | str) -> Port:
    return Port(name=name, dtype=torch.float32, axes=axes)
