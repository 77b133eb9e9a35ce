"""Tables of disentangled attention for each layer of an encoder, computed once from the trained weights.

Axes: P rows of the table of relative positions, H heads, D head width.
"""

from __future__ import annotations

from torch import Tensor, nn

from antiphon.ops.disentangled import RelativePositions
from antiphon.transformer.layers import EncoderLayer, SelfAttention
from antiphon.transformer.transformer import Encoder


class RelativeTables(nn.Module):
    """Tables that disentangled attention reads in one layer: keys and queries of positions, constant after training.

    rows [2 * reach + 1] int32; keys, queries [P, H D] or None.
    """

    rows: Tensor
    keys: Tensor | None
    queries: Tensor | None

    def __init__(self, attention: SelfAttention, positions: RelativePositions, max_len: int) -> None:
        assert attention.relative is not None
        super().__init__()
        table, _ = positions(1)
        keys, queries = attention.relative(table, attention.qkv)
        self.register_buffer("rows", positions.by_distance(max_len), persistent=False)
        self.register_buffer("keys", None if keys is None else keys.detach(), persistent=False)
        self.register_buffer("queries", None if queries is None else queries.detach(), persistent=False)


def relative_tables(encoder: Encoder, max_len: int) -> nn.ModuleList:
    """Return the RelativeTables of each layer for sources of at most max_len tokens; empty for other attentions."""
    positions = encoder.relative_positions
    layers = (layer for layer in encoder.layers if isinstance(layer, EncoderLayer))
    return nn.ModuleList(
        RelativeTables(layer.self_attention, positions, max_len) for layer in layers if positions is not None
    )
