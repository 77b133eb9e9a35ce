"""Inputs and outputs of a bundle's graphs as data: names, element types and axes for every lowering.

This is the contract of `manifest.GraphSet` in the form that the exporter and the steppers need.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.model.bundle.manifest import Lowering
from antiphon.model.config import ModelConfig
from antiphon.model.head_config import HeadConfig
from antiphon.model.ops.cache_geometry import pool_axes


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """One input or output of a graph: name, element type and axes; an axis of free size is a string."""

    name: str
    dtype: torch.dtype
    axes: tuple[int | str, ...]

    def example(self, sizes: dict[str, int]) -> Tensor:
        """Return a tensor of ones (a valid id, length and number); `sizes` gives the sizes of the free axes."""
        return torch.ones([axis if isinstance(axis, int) else sizes[axis] for axis in self.axes], dtype=self.dtype)


def encoder_inputs(config: ModelConfig, lowering: Lowering) -> list[Port]:
    """Return the inputs of the encoder graph."""
    if lowering != "native":
        return [_ids("input_ids", "batch", "source")]
    packed = [_ids("input_ids", "tokens"), _ints("positions", "tokens"), _ints("offsets", "offsets")]
    if config.architecture == "encoder":
        return [*packed, _ids("type_ids", "tokens")] if config.token_types else packed
    return [*packed, _ints("block_tables", "rows", "table"), pool_port(config)]


def encoder_outputs(config: ModelConfig, lowering: Lowering) -> list[Port]:
    """Return the outputs of the encoder graph.

    Contrib and eager: cross keys and values for each decoder layer. Native: the encoder's states, and with a decoder
    also the number of written tokens.
    """
    if lowering != "native":
        return cache_ports(config, "encoder", "source", "present")
    memory = _floats("memory", "tokens", config.d_model)
    return [memory] if config.architecture == "encoder" else [_ints("written", 1), memory]


def head_inputs(config: ModelConfig) -> list[Port]:
    """Return the inputs of a head's graph: states of the tokens that its task uses."""
    return [_floats("hidden", "states", config.d_model)]


def head_outputs(config: ModelConfig, head: HeadConfig) -> list[Port]:
    """Return the outputs of a head's graph."""
    widths = {"fill_mask": config.vocab_size, "pool": head.transform_width or config.d_model}
    return [_floats("outputs", "states", widths.get(head.task, len(head.labels)))]


def decoder_inputs(config: ModelConfig, lowering: Lowering) -> list[Port]:
    """Return the inputs of the decoder graph for one step."""
    if lowering == "native":
        return _paged_decoder_inputs(config)
    return [
        _ids("input_ids", "batch", 1),
        _ints("past_lens", "batch"),
        _ints("source_lens", "batch"),
        *cache_ports(config, "decoder", "target_capacity", "past_key_values"),
        *cache_ports(config, "encoder", "source_capacity", "past_key_values"),
    ]


def decoder_outputs(config: ModelConfig, lowering: Lowering) -> list[Port]:
    """Return the outputs of the decoder graph for one step.

    Contrib and eager: logits and the self caches with the new token. Native: sampled tokens and log-probabilities.
    """
    if lowering != "native":
        logits = _floats("logits", "batch", config.vocab_size)
        return [logits, *cache_ports(config, "decoder", "target_capacity", "present")]
    return [
        _ids("token_ids", "samples"),
        _floats("logprobs", "samples"),
        _ids("top_ids", "samples", "top"),
        _floats("top_logprobs", "samples", "top"),
        _floats("top_scores", "samples", "top"),
    ]


def cache_ports(config: ModelConfig, side: str, capacity: str, prefix: str) -> list[Port]:
    """Return key and value caches of all decoder layers; side is `decoder` (self) or `encoder` (cross attention)."""
    axes = ("batch", config.num_heads, capacity, config.resolved_head_dim)
    return [
        _floats(f"{prefix}.{layer}.{side}.{name}", *axes)
        for layer in range(config.decoder_layers)
        for name in ("key", "value")
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


def _ids(name: str, *axes: int | str) -> Port:
    return Port(name=name, dtype=torch.int64, axes=axes)


def _ints(name: str, *axes: int | str) -> Port:
    return Port(name=name, dtype=torch.int32, axes=axes)


def _floats(name: str, *axes: int | str) -> Port:
    return Port(name=name, dtype=torch.float32, axes=axes)
