"""Positions: sinusoidal, learned, rotary, T5's relative buckets and ALiBi.

Sinusoidal and learned positions are added to embeddings. Rotary positions rotate queries and keys. Relative buckets and
ALiBi add a bias to the attention scores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from antiphon.architecture.config import ModelConfig, RopeScaling, Sinusoids
from antiphon.ops import fixed_positions


def sinusoidal_table(length: int, width: int, layout: Sinusoids = "interleaved") -> Tensor:
    """Return sines and cosines of each position, [length, width] float32; see ops/fixed_positions.py."""
    return torch.from_numpy(fixed_positions.sinusoids(length, width, layout))


class AbsolutePositions(nn.Module):
    """Addition of a sinusoidal or learned vector for each position; no change for the other kinds.

    The table has positions_offset unused rows before the first position: two in BART, and the rows up to the padding
    id in M2M-100.
    """

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        super().__init__()
        self.offset = config.positions_offset
        length = max_len + self.offset
        self.table: Tensor | None
        if config.positions == "learned":
            self.table = nn.Parameter(torch.empty(length, config.resolved_embedding_width))
            nn.init.normal_(self.table, std=config.d_model**-0.5)
        elif config.positions == "sinusoidal":
            table = sinusoidal_table(length, config.resolved_embedding_width, config.sinusoids)
            self.register_buffer("table", table, persistent=False)
        else:
            self.table = None

    @property
    def vectors(self) -> Tensor | None:
        """Vector of each position, [max_len, W]; None for kinds that add no vectors."""
        return self.table[self.offset :] if self.table is not None and self.offset else self.table

    def forward(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """Add vectors of positions [B or 1, T] int to embedded [B, T, W]. Returns [B, T, W]."""
        if self.vectors is None:
            return embedded
        return embedded + functional.embedding(positions, self.vectors).to(embedded.dtype)


def rotary_rates(width: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """Return the increase of each angle from one position to the next, [width / 2] float32, in radians."""
    return torch.from_numpy(fixed_positions.rotary_rates(width, theta, scaling)).to(device)


def rotary_tables(positions: Tensor, width: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
    """Return cos and sin of rotary positions [...], each [..., 1, width / 2] float32 (Su et al. 2021, section 3.4)."""
    angle = positions[..., None].float() * rotary_rates(width, theta, scaling, positions.device)
    return angle.cos()[..., None, :], angle.sin()[..., None, :]


def rotary_table(length: int, width: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Return a table [length, width] float32: for each position cos of its width / 2 angles, then sin of them."""
    cos, sin = rotary_tables(torch.arange(length), width, theta, scaling)
    return torch.cat((cos, sin), dim=-1)[:, 0]


def rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate head vectors [B, T, H, D]: element i and element i + D / 2 are a pair (Su et al. 2021, section 3.4)."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(vectors.dtype)


def alibi_slopes(num_heads: int) -> Tensor:
    """Return ALiBi slopes [H] float32 (Press et al. 2022, section 3)."""
    return torch.from_numpy(fixed_positions.alibi_slopes(num_heads))


def relative_bucket(distance: Tensor, *, bidirectional: bool, buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance, key position minus query position (Raffel et al. 2020, section 2.1).

    distance and result: int64 of the same shape. Half of the buckets hold one distance each; the widths of the other
    buckets grow logarithmically up to max_distance.
    """
    offset = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        offset = (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    far = exact + (
        torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    ).long().clamp(max=buckets - exact - 1)
    return offset + torch.where(distance < exact, distance, far)


class RelativeBias(nn.Module):
    """Score bias of one stack, shared by its layers: T5's learned buckets or ALiBi's slopes; None for other kinds."""

    def __init__(self, config: ModelConfig, *, bidirectional: bool) -> None:
        super().__init__()
        self.kind = config.positions
        self.bidirectional = bidirectional
        self.buckets = config.relative_buckets
        self.max_distance = config.relative_max_distance
        if self.kind == "t5_relative":
            self.weight = nn.Parameter(torch.empty(self.buckets, config.num_heads))
            nn.init.normal_(self.weight, std=config.d_model**-0.5)
        elif self.kind == "alibi":
            self.register_buffer("slopes", alibi_slopes(config.num_heads), persistent=False)

    def forward(self, query_positions: Tensor, keys: int) -> Tensor | None:
        """Return the bias [B or 1, H, T, keys] for query_positions [B or 1, T] int; None for other kinds."""
        if self.kind not in ("t5_relative", "alibi"):
            return None
        key_positions = torch.arange(keys, device=query_positions.device)
        distance = key_positions - query_positions[..., None].long()  # [B or 1, T, keys]
        if self.kind == "alibi":
            slopes: Tensor = self.get_buffer("slopes")
            return -distance.abs()[:, None].float() * slopes[:, None, None]
        bucket = relative_bucket(
            distance, bidirectional=self.bidirectional, buckets=self.buckets, max_distance=self.max_distance
        )
        return self.weight[bucket].permute(0, 3, 1, 2)

    def by_distance(self, reach: int) -> Tensor | None:
        """Return T5's bias of each distance from -reach to reach, [H, 2 * reach + 1]; None for other kinds.

        Distance is key position minus query position. All distances from max_distance on have the same bucket, so
        reach = max_distance is enough.
        """
        if self.kind != "t5_relative":
            return None
        return self.weight.detach()[self.buckets_by_distance(reach)].T.contiguous()

    def buckets_by_distance(self, reach: int) -> Tensor:
        """Return T5's bucket of each distance from -reach to reach, [2 * reach + 1] int64."""
        return relative_bucket(
            torch.arange(-reach, reach + 1),
            bidirectional=self.bidirectional,
            buckets=self.buckets,
            max_distance=self.max_distance,
        )
