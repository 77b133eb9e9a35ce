"""Initial weights of an encoder with learned positions, with which heads look at each token and at a neighbour of it.

A masked token is guessed from its neighbours. From random weights, attention must first find out which positions are
neighbours, and until then a masked language model knows little more than the frequencies of tokens. The idea is that of
Trockman and Kolter 2023, "Mimetic Initialization of Self-Attention Layers": there queries and keys begin alike, so a
token looks at similar positions; here queries are shifted by a few positions. Training then changes all weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from antiphon.transformer.layers import EncoderLayer
from antiphon.transformer.transformer import Encoder

OFFSETS = (-1, 1, -2, 2)
"""Distance from a token to the one that a head looks at; heads take turns."""
SHARPNESS = 3.0
"""Factor on queries, so that a head gives most of its weight to a few positions."""
SHORTEST = 4.0
"""Shortest wavelength of the position vectors, in positions; the longest is twice the number of positions."""
POSITION_SIZE = 1.5
"""Standard deviation of the elements of position vectors, divided by that of token embeddings."""


def wavelengths(num_positions: int, width: int) -> Tensor:
    """Return the wavelengths of position vectors, in positions, [width / 2] float32, in a geometric series."""
    return torch.logspace(math.log10(SHORTEST), math.log10(2 * num_positions), width // 2)


def waves(num_positions: int, width: int) -> Tensor:
    """Return position vectors [num_positions, width] float32: sines, then cosines, of the wavelengths."""
    angles = torch.arange(num_positions)[:, None] * (2 * math.pi / wavelengths(num_positions, width))
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def shift(num_positions: int, width: int, offset: int) -> Tensor:
    """Return the matrix [width, width] that maps the vector of each position to that of position + offset."""
    angles = offset * (2 * math.pi / wavelengths(num_positions, width))
    cos, sin = angles.cos().diag(), angles.sin().diag()
    return torch.cat((torch.cat((cos, sin), dim=1), torch.cat((-sin, cos), dim=1)))


@torch.no_grad()
def start_at_neighbours(encoder: Encoder) -> None:
    """Set position vectors to waves, and query weights of each head to its key weights applied to shifted positions.

    The encoder must have learned positions of an even width. Its other weights do not change.
    """
    table = encoder.positions.vectors
    assert table is not None
    num_positions, width = table.shape
    vectors = waves(num_positions, width)
    token_size = encoder.embedding.weight.std() * encoder.embedding_scale
    table.copy_(vectors * (POSITION_SIZE * token_size / vectors.std()))
    shifts = [_in_layers(shift(num_positions, width, offset), encoder.widen) for offset in OFFSETS]
    for layer in encoder.layers:
        assert isinstance(layer, EncoderLayer)
        num_heads, head_dim = layer.self_attention.heads
        queries, keys, _ = layer.self_attention.qkv.weight.view(3, num_heads, head_dim, -1)
        for head in range(num_heads):
            queries[head] = SHARPNESS * keys[head] @ shifts[head % len(shifts)]


def _in_layers(matrix: Tensor, widen: nn.Module) -> Tensor:
    """Return the matrix [M, M] that does to the layers' states what `matrix` [W, W] does to embeddings.

    widen: map from embeddings of width W to states of width M; the identity if they are equal.
    """
    if not isinstance(widen, nn.Linear):
        return matrix
    narrow: Tensor = torch.linalg.pinv(widen.weight)
    return widen.weight @ matrix @ narrow
