"""Disentangled attention (He et al. 2021, section 3.1): scores of content against relative positions, and the reverse.

A score is q_i k_j + q_i P^k[row(i - j)] + k_j P^q[row(i - j)], with the same scale for all terms. The layers share one
table of relative positions; each layer projects it as keys, P^k, and as queries, P^q. The paper indexes the last term
by j - i, with mirrored rows; here both terms use the same row.

Axes: B batch, T queries, S keys, H heads, D head width, M model width, P rows of the table.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from antiphon.architecture.config import Disentangled, ModelConfig


def table_rows(distance: Tensor, config: Disentangled) -> Tensor:
    """Return the row of the table for each distance query - key (int64, same shape): 0 to 2 * span - 1.

    Every distance up to span has its own row. With max_distance, this holds up to half of span; greater distances share
    the other rows on a logarithmic scale (DeBERTa v2). Computed in float32 and in the order of the authors' code, since
    rounding decides between rows.
    """
    if config.max_distance is not None:
        distance = _log_bucket(distance, config.span, config.max_distance)
    return (distance + config.span).clamp(0, 2 * config.span - 1)


def _log_bucket(distance: Tensor, span: int, max_distance: int) -> Tensor:
    middle = span // 2
    size = distance.abs().clamp(min=middle - 1)
    rate = torch.log(torch.tensor((max_distance - 1) / middle))
    far = torch.ceil(torch.log(size / middle) / rate * (middle - 1)) + middle
    return torch.where(size <= middle, distance, (far * distance.sign()).long())


class RelativePositions(nn.Module):
    """Table of relative positions that the layers of a stack share."""

    def __init__(self, config: ModelConfig, kind: Disentangled) -> None:
        super().__init__()
        self.config = kind
        self.weight = nn.Parameter(torch.empty(2 * kind.span, config.d_model))
        nn.init.normal_(self.weight, std=config.d_model**-0.5)
        self.norm = nn.LayerNorm(config.d_model, eps=config.norm_eps) if kind.norm else None

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        """Return the table [P, M], and its row [T, T] for each query and key of a sequence of this length."""
        table = self.weight if self.norm is None else self.norm(self.weight)
        positions = torch.arange(length, device=table.device)
        return table, table_rows(positions[:, None] - positions, self.config)

    def by_distance(self, max_len: int) -> Tensor:
        """Return the rows [2 * max_len - 1] int32 of all distances query - key, from the least to the greatest."""
        reach = max_len - 1
        return table_rows(torch.arange(-reach, reach + 1), self.config).int()


class PositionProjections(nn.Module):
    """Projections of the table in one layer: separate ones, or the layer's projections of queries and keys."""

    def __init__(self, config: ModelConfig, kind: Disentangled) -> None:
        super().__init__()
        self.config = kind
        own = not kind.share_projections
        width = config.attention_width
        self.key = nn.Linear(config.d_model, width) if own and kind.content_to_position else None
        self.query = nn.Linear(config.d_model, width) if own and kind.position_to_content else None

    def forward(self, table: Tensor, qkv: nn.Linear) -> tuple[Tensor | None, Tensor | None]:
        """Project table [P, M] to position keys and queries, each [P, H D] or None where the model has none."""
        if self.config.share_projections:
            query, key, _ = functional.linear(table, qkv.weight, qkv.bias).chunk(3, dim=-1)
        else:
            key = self.key(table) if self.key is not None else table
            query = self.query(table) if self.query is not None else table
        return key if self.config.content_to_position else None, query if self.config.position_to_content else None


def position_scores(
    query: Tensor, key: Tensor, position_keys: Tensor | None, position_queries: Tensor | None, rows: Tensor
) -> Tensor:
    """Return the terms of relative positions [B, H, T, S], to be added to scores before they are scaled.

    query [B, T, H, D], key [B, S, H, D]; position_keys, position_queries [P, H D] or None; rows [T, S] int64.
    """
    heads = query.shape[2]
    scores = query.new_zeros(query.shape[0], heads, *rows.shape)
    index = rows.expand(query.shape[0], heads, *rows.shape)
    if position_keys is not None:
        content = torch.einsum("bthd,phd->bhtp", query, position_keys.reshape(len(position_keys), heads, -1))
        scores = scores + content.gather(3, index)
    if position_queries is not None:
        content = torch.einsum("bshd,phd->bhsp", key, position_queries.reshape(len(position_queries), heads, -1))
        scores = scores + content.gather(3, index.transpose(2, 3)).transpose(2, 3)
    return scores
