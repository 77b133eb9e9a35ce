"""Attention weights as messages: a map for each layer and head, with its entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from antiphon.v1 import inference_pb2 as pb


class Explanation(Protocol):
    """Attention weights of one source and target; L layers, H heads, S source and T target tokens, all float32."""

    @property
    def encoder_self(self) -> NDArray[np.float32]:
        """Encoder self-attention, [L, H, S, S]."""

    @property
    def decoder_self(self) -> NDArray[np.float32]:
        """Decoder self-attention, [L, H, T, T]."""

    @property
    def cross(self) -> NDArray[np.float32]:
        """Cross-attention, [L, H, T, S]."""


class AttentionExplainer(Protocol):
    """Computes attention maps, one call at a time. Blocks."""

    def explain(self, source_ids: Sequence[int], target_ids: Sequence[int], begin_id: int | None = None) -> Explanation:
        """Return the maps of a source, end token included, and of begin_id followed by a target.

        begin_id: None is the model's begin token.
        Raises Unsupported if the bundle has no graph for it.
        """


def explain_response(
    explanation: Explanation, *, source_tokens: Sequence[str], target_tokens: Sequence[str]
) -> pb.ExplainResponse:
    """Return attention weights as a message. Takes time in proportion to their number: not for an event loop."""
    return pb.ExplainResponse(
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        encoder_self=_maps(explanation.encoder_self),
        decoder_self=_maps(explanation.decoder_self),
        cross=_maps(explanation.cross),
    )


def mean_entropies(weights: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the entropy in nats of each query's weights, averaged over queries: [L, H] from [L, H, queries, keys]."""
    wide = weights.astype(np.float64)
    logs = np.log(wide, out=np.zeros_like(wide), where=wide > 0)
    entropies: NDArray[np.float64] = -(wide * logs).sum(axis=-1).mean(axis=-1)
    return entropies


def _maps(weights: NDArray[np.float32]) -> list[pb.AttentionMap]:
    num_layers, num_heads, rows, columns = weights.shape
    entropies = mean_entropies(weights)
    return [
        pb.AttentionMap(
            layer=layer,
            head=head,
            rows=rows,
            columns=columns,
            weights=weights[layer, head].ravel().tolist(),
            entropy=entropies[layer, head],
        )
        for layer in range(num_layers)
        for head in range(num_heads)
    ]
