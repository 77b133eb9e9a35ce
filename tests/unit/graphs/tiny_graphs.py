"""Tiny network in NumPy, the reference of the graphs that tiny_native.py builds.

One encoder block without norms, decoder layers with cached self-attention and cross-attention, random weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from antiphon.architecture.config import ModelConfig

Array = NDArray[np.float32]


def tiny_config(max_len: int = 24) -> ModelConfig:
    return ModelConfig(
        vocab_size=24, d_model=16, encoder_layers=1, decoder_layers=2, num_heads=2, d_ff=16,
        positions="none", max_source_len=max_len, max_target_len=max_len,
    )  # fmt: skip


@dataclass(frozen=True)
class TinyModel:
    """Weights by name, and reference outputs for one sequence, computed without caches."""

    config: ModelConfig
    weights: dict[str, Array]

    def memory(self, source: Sequence[int]) -> Array:
        """Return the encoder's states [S, M] of a source."""
        w = self.weights
        embedded = w["embedding"][list(source)]
        return embedded + self._attend(embedded @ w["enc_q"], embedded @ w["enc_k"], embedded @ w["enc_v"])

    def logits(self, source: Sequence[int], targets: Sequence[int]) -> Array:
        """Return the logits [V] of the token after targets."""
        w, width, memory = self.weights, self.config.d_model, self.memory(source)
        hidden = w["embedding"][list(targets)]
        causal = np.where(np.tri(len(targets), dtype=bool), 0, -np.inf).astype(np.float32)
        for layer in range(self.config.decoder_layers):
            query, key, value = np.split(hidden @ w[f"self_qkv_{layer}"], [width, 2 * width], axis=-1)
            hidden = hidden + self._attend(query, key, value, causal)
            keys, values = memory @ w[f"cross_k_{layer}"], memory @ w[f"cross_v_{layer}"]
            hidden = hidden + self._attend(hidden @ w[f"cross_q_{layer}"], keys, values)
        return np.asarray(hidden[-1] @ w["embedding"].T)

    def _attend(self, query: Array, key: Array, value: Array, mask: Array | float = 0.0) -> Array:
        heads = self.config.num_heads
        q, k, v = (x.reshape(len(x), heads, -1).swapaxes(0, 1) for x in (query, key, value))
        scores = q @ k.swapaxes(1, 2) * q.shape[-1] ** -0.5 + mask
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = weights / weights.sum(axis=-1, keepdims=True) @ v
        return np.asarray(mixed.swapaxes(0, 1).reshape(query.shape))


def tiny_model(config: ModelConfig, seed: int = 0) -> TinyModel:
    generator = np.random.default_rng(seed)
    width = config.d_model
    shapes = {"embedding": (config.vocab_size, width), **{f"enc_{part}": (width, width) for part in "qkv"}}
    for layer in range(config.decoder_layers):
        shapes[f"self_qkv_{layer}"] = (width, 3 * width)
        shapes |= {f"cross_{part}_{layer}": (width, width) for part in "qkv"}
    scale = width**-0.5
    return TinyModel(config, {k: generator.normal(0, scale, s).astype(np.float32) for k, s in shapes.items()})
