"""Entropy of attention during training. A head with low entropy gives nearly all of its weight to one token.

Without the factor 1 / sqrt(D) the softmax saturates, and its gradient vanishes (Vaswani et al. 2017, section 3.2.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from antiphon.ops.attention import attention_weights
from antiphon.transformer.layers import CrossAttention, SelfAttention


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
    found = Entropies()
    replaced: list[tuple[SelfAttention | CrossAttention, Callable[..., Tensor]]] = []
    for name, module in model.named_modules():
        if isinstance(module, SelfAttention | CrossAttention):
            replaced.append((module, module.attend))
            module.attend = partial(_recorded, module.attend, found, _kind(name))
    try:
        yield found
    finally:
        for module, attend in replaced:
            module.attend = attend


def _kind(name: str) -> str:
    side = "encoder" if ".decoder." not in f".{name}." else "decoder"
    return f"{side}_{'cross' if name.endswith('cross_attention') else 'self'}"


def _recorded(
    attend: Callable[..., Tensor],
    found: Entropies,
    kind: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_lens: Tensor | None,
    bias: Tensor | None,
    **settings: Any,
) -> Tensor:
    weights = attention_weights(query, key, key_lens, bias, **settings).detach().float()
    found.values.setdefault(kind, []).append(float(torch.special.entr(weights).sum(dim=-1).mean()))
    return attend(query, key, value, key_lens, bias, **settings)
