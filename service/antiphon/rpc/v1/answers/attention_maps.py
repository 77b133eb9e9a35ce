"""Attention weights as messages: a map for each layer and head, with its entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from antiphon.v1 import inference_pb2 as pb


class AttentionExplainer(Protocol):
    """Computes attention maps, one call at a time. Blocks."""

    def explain(
        self, source_ids: Sequence[int] = (), target_ids: Sequence[int] = (), type_ids: Sequence[int] = ()
    ) -> Mapping[str, NDArray[np.float32]]:
        """Return the maps for the tokens that the encoder and the decoder read, end and begin token included.

        By name: encoder_self [L, H, S, S], decoder_self [L, H, T, T] and cross [L, H, T, S] float32; an attention that
        the model lacks has no entry.
        type_ids: token types of the source; empty if all are 0. Raises Unsupported if there are too many weights.
        """

    def longest_target(self, source_len: int) -> int:
        """Return the largest number of decoder tokens whose maps, with those of a source, are not too many."""


def explain_response(
    weights: Mapping[str, NDArray[np.float32]], *, source_tokens: Sequence[str], target_tokens: Sequence[str]
) -> pb.ExplainResponse:
    """Return attention weights as a message. Takes time in proportion to their number: not for an event loop."""
    return pb.ExplainResponse(
        source_tokens=source_tokens,
        target_tokens=target_tokens,
        **{name: _maps(each) for name, each in weights.items()},
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
