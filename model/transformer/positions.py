"""Where a token stands: the five ways a Transformer is told, each a small module or function.

Absolute positions are added to embeddings, rotary ones turn queries and keys, relative ones bias the scores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from antiphon.model.config import LinearScaling, ModelConfig, RopeScaling, Sinusoids


def sinusoidal_table(length: int, width: int, layout: Sinusoids = "interleaved") -> Tensor:
    """[length, width] float32: sines and cosines of each position (Vaswani et al. 2017, section 3.5).

    interleaved  sin on even columns, cos on odd ones: the paper
    halves       all sines, then all cosines: Marian, PEGASUS
    fairseq      halves whose slowest rate is 1/10000 itself, which the paper's stops short of: M2M-100, NLLB
    """
    position = torch.arange(length, dtype=torch.float64)[:, None]
    last = width - 2 if layout == "fairseq" else width
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000.0) / last))
    sin, cos = torch.sin(position * rate), torch.cos(position * rate)
    if layout == "interleaved":
        return torch.stack((sin, cos), dim=-1).flatten(1).float()
    return torch.cat((sin, cos), dim=1).float()


class AbsolutePositions(nn.Module):
    """Adds a sinusoidal or learned vector for each position; adds nothing for the other kinds.

    The table has positions_offset rows more than positions: BART keeps two before its first, M2M-100 its padding's.
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
        """What each position adds, [max_len, M]; None for kinds that add nothing."""
        return self.table[self.offset :] if self.table is not None and self.offset else self.table

    def forward(self, embedded: Tensor, positions: Tensor) -> Tensor:
        """embedded [B, T, M]; positions [B or 1, T] int. Returns [B, T, M]."""
        if self.vectors is None:
            return embedded
        return embedded + functional.embedding(positions, self.vectors).to(embedded.dtype)


def rotary_rates(width: int, theta: float, scaling: RopeScaling | None, device: torch.device) -> Tensor:
    """[width / 2] float32: radians that each angle grows by from a position to the next (Su et al. 2021, section 3.4).

    llama3 as Llama 3.1 has it: what turns often within the original length keeps its rate, what hardly turns is slower.
    """
    rate = theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    if scaling is None:
        return rate
    if isinstance(scaling, LinearScaling):
        return rate / scaling.factor
    turns = rate * (scaling.original_max_position_embeddings / (2 * math.pi))
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return rate * (kept + (1 - kept) / scaling.factor)


def rotary_tables(positions: Tensor, width: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
    """cos and sin, each [..., 1, width / 2] float32, for rotary embeddings (Su et al. 2021, section 3.4)."""
    angle = positions[..., None].float() * rotary_rates(width, theta, scaling, positions.device)
    return angle.cos()[..., None, :], angle.sin()[..., None, :]


def rotary_table(length: int, width: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """[length, width] float32: of each position cos of its width / 2 angles, then sin, as `rotary_tables`."""
    cos, sin = rotary_tables(torch.arange(length), width, theta, scaling)
    return torch.cat((cos, sin), dim=-1)[:, 0]


def rotate(vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of each head vector [B, T, H, D] against each other by its position's angles."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(vectors.dtype)


def alibi_slopes(num_heads: int) -> Tensor:
    """[H] float32 slopes (Press et al. 2022, section 3); between powers of two as in the authors' code."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)


def relative_bucket(distance: Tensor, *, bidirectional: bool, buckets: int, max_distance: int) -> Tensor:
    """Bucket of key position minus query position (Raffel et al. 2020, section 2.1; int64, same shape).

    Half of the buckets hold exact distances, the rest grow logarithmically up to max_distance.
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
    """Score bias of one stack, shared by its layers: T5's learned buckets or ALiBi's fixed slopes; else None."""

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
        """query_positions [B or 1, T] int. Returns [B or 1, H, T, keys] or None."""
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
        """T5's bias as [H, 2 * reach + 1], by key position minus query position from -reach; None for other kinds.

        Distances from max_distance on share their buckets, so a reach that far tells all there is.
        """
        if self.kind != "t5_relative":
            return None
        bucket = relative_bucket(
            torch.arange(-reach, reach + 1),
            bidirectional=self.bidirectional,
            buckets=self.buckets,
            max_distance=self.max_distance,
        )
        return self.weight.detach()[bucket].T.contiguous()
