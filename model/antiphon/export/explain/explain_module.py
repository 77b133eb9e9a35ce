"""The Transformer's forward pass with the attention weights of every head as outputs, for every ModelConfig.

It is a second implementation in float32, apart from the one that computes answers, so the code prefers clarity to
speed.

Axes: S source, T target, M model width, H heads, D head width, L encoder layers, Ld decoder layers.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from antiphon.bundle.explain_session import explain_inputs
from antiphon.export.graphs.relative_tables import RelativeTables, relative_tables
from antiphon.ops.attention import visible_keys
from antiphon.ops.disentangled import position_scores
from antiphon.transformer.layers import CrossAttention, EncoderLayer, SelfAttention
from antiphon.transformer.positions import rotary_tables, rotate
from antiphon.transformer.transformer import Stack, Transformer


class ExplainModule(nn.Module):
    """Forward pass that returns the attention weights only; shares the parameters of a Transformer."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.config = model.config
        self.encoder, self.decoder = model.encoder, model.decoder
        self.relative = nn.ModuleList()
        if self.encoder is not None:
            self.relative = relative_tables(self.encoder, self.config.max_source_len)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the maps in the order of their names. tensors: inputs of bundle/explain_session.py, in their order."""
        return tuple(self.maps(*tensors).values())

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs of `forward`."""
        parts = {"encoder_self": self.encoder, "decoder_self": self.decoder}
        maps = [name for name, part in parts.items() if part is not None]
        return [*maps, "cross"] if len(maps) == 2 else maps

    def maps(self, *tensors: Tensor) -> dict[str, Tensor]:
        """Return the attention weights of one source and target by name.

        encoder_self [L, H, S, S], decoder_self [Ld, H, T, T] and cross [Ld, H, T, S] float32; a model of one part has
        the maps of this part. The weights of a query sum to 1; masked keys have weight 0.
        """
        ids = dict(zip(explain_inputs(self.config), tensors, strict=True))
        found: dict[str, Tensor] = {}
        memory = None
        if "source_ids" in ids:
            memory, found["encoder_self"] = self._encode(ids["source_ids"], ids.get("type_ids"))
        if "target_ids" in ids:
            found["decoder_self"], cross = self._decode(ids["target_ids"], memory)
            if cross is not None:
                found["cross"] = cross
        return found

    def _encode(self, ids: Tensor, type_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the memory [1, S, M] and the encoder's attention weights [L, H, S, S]."""
        assert self.encoder is not None
        hidden, positions, bias = _embedded(self.encoder, ids, type_ids)
        maps = []
        for index, layer in enumerate(self.encoder.layers):
            assert isinstance(layer, EncoderLayer)
            relative = cast(RelativeTables, self.relative[index]) if self.relative else None
            residual = layer.self_residual
            update, weights = _self_attention(layer.self_attention, residual.before(hidden), positions, bias, relative)
            hidden = residual.after(hidden, update)
            residual = layer.feed_forward_residual
            hidden = residual.after(hidden, layer.feed_forward(residual.before(hidden)))
            maps.append(weights)
        return self.encoder.final_norm(hidden), torch.cat(maps)

    def _decode(self, ids: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the decoder's attention weights over itself [Ld, H, T, T] and over the source [Ld, H, T, S].

        memory: None for a decoder-only model, which has no weights over a source.
        """
        assert self.decoder is not None
        hidden, positions, bias = _embedded(self.decoder, ids)
        self_maps, cross_maps = [], []
        for layer in self.decoder.blocks:
            residual = layer.self_residual
            update, weights = _self_attention(layer.self_attention, residual.before(hidden), positions, bias)
            hidden = residual.after(hidden, update)
            self_maps.append(weights)
            if layer.cross_attention is not None and layer.cross_residual is not None:
                assert memory is not None
                residual = layer.cross_residual
                update, weights = _cross_attention(layer.cross_attention, residual.before(hidden), memory)
                hidden = residual.after(hidden, update)
                cross_maps.append(weights)
            residual = layer.feed_forward_residual
            hidden = residual.after(hidden, layer.feed_forward(residual.before(hidden)))
        return torch.cat(self_maps), torch.cat(cross_maps) if cross_maps else None


def _embedded(stack: Stack, ids: Tensor, type_ids: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the embeddings [1, T, M], positions [1, T] and score bias [1, H, T, T] of one sequence."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return stack.embed(ids, positions, type_ids), positions, stack.relative_bias(positions, ids.shape[1])


def _self_attention(
    attention: SelfAttention,
    hidden: Tensor,
    positions: Tensor,
    bias: Tensor | None,
    relative: RelativeTables | None = None,
) -> tuple[Tensor, Tensor]:
    """Map hidden [1, T, M] to the update [1, T, M] and the attention weights [1, H, T, T]."""
    query, key, value = (part.unflatten(-1, attention.heads) for part in attention.qkv(hidden).chunk(3, dim=-1))
    if attention.rope_theta is not None:
        cos, sin = rotary_tables(positions, attention.heads[1], attention.rope_theta, attention.rope_scaling)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    if relative is not None:
        distance = positions[0, :, None] - positions[0]  # [T, T], query minus key
        rows = relative.rows[distance + len(relative.rows) // 2].long()
        bias = position_scores(query, key, relative.keys, relative.queries, rows) * attention.scale
    weights = _weights(query, key, bias, scale=attention.scale, causal=attention.causal)
    return _weighted_sums(attention.out, weights, value), weights


def _cross_attention(attention: CrossAttention, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Map hidden [1, T, M] and memory [1, S, M] to the update [1, T, M] and the attention weights [1, H, T, S]."""
    query = attention.query(hidden).unflatten(-1, attention.heads)
    key, value = (part.unflatten(-1, attention.heads) for part in attention.kv(memory).chunk(2, dim=-1))
    weights = _weights(query, key, None, scale=attention.scale, causal=False)
    return _weighted_sums(attention.out, weights, value), weights


def _weights(query: Tensor, key: Tensor, bias: Tensor | None, *, scale: float, causal: bool) -> Tensor:
    """Return softmax(scale * Q K^T + bias) [1, H, T, S] of query [1, T, H, D] and key [1, S, H, D]."""
    scores = torch.matmul(query.transpose(1, 2), key.permute(0, 2, 3, 1)) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        seen = visible_keys(query.shape[1], key.shape[1], None, causal=True, device=query.device)
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(dim=-1)


def _weighted_sums(out: nn.Linear, weights: Tensor, value: Tensor) -> Tensor:
    """Add values [1, S, H, D] with weights [1, H, T, S] and project the sums to [1, T, M]."""
    attended: Tensor = out(torch.matmul(weights, value.transpose(1, 2)).transpose(1, 2).flatten(-2))
    return attended
