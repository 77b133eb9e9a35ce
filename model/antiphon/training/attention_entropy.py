"""Entropy of attention during training. A head with low entropy gives nearly all of its weight to one token.

Without the factor 1 / sqrt(D) the softmax saturates, and its gradient vanishes (Vaswani et al. 2017, section 3.2.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from antiphon.transformer.recorder import Kind, record_weights


@dataclass(slots=True)
class Entropies:
    """Entropies of every attention module that ran, by kind: encoder_self, decoder_self or decoder_cross."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def mean(self) -> dict[str, float]:
        """Return the mean of each kind over its modules, in nats."""
        return {kind: sum(values) / len(values) for kind, values in self.values.items()}


@contextmanager
def recorded_entropies(model: nn.Module) -> Iterator[Entropies]:
    """Record the entropy of every attention module of a model inside the context; its outputs do not change.

    A module's value is the mean over rows, heads and positions of the batch, padding included, in nats.
    """
    entropies = Entropies()

    def record(kind: Kind, weights: Tensor) -> None:
        entropy = torch.special.entr(weights.detach().float()).sum(dim=-1).mean()
        entropies.values.setdefault(kind, []).append(float(entropy))

    end = record_weights(model, record)
    try:
        yield entropies
    finally:
        end()
