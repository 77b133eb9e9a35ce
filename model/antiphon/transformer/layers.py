"""Layers of the Transformer (Vaswani et al. 2017 and common variants); ModelConfig selects the variant.

Normalisation, feed-forward, self-attention and cross-attention, residual connections, and the encoder and decoder
layers built from them. A backend name selects the attention function: the eager reference, or PyTorch's fused kernel
for training. Embeddings and stacks are in transformer.py.

Axes: B batch, S source, T target, M model width, H heads, D head width, C cache capacity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.ops.activations import ACTIVATIONS
from antiphon.ops.attention import Backend, attention, cached_attention, sdpa_attention
from antiphon.ops.disentangled import PositionProjections, position_scores
from antiphon.transformer.dropout import Dropout
from antiphon.transformer.positions import rotary_tables, rotate

KV = tuple[Tensor, Tensor]


@dataclass(slots=True)
class SelfCache:
    """Keys and values [B, H, C, D] of the first lens [B] int32 tokens of each row; attention appends new tokens."""

    keys: Tensor
    values: Tensor
    lens: Tensor


Relative = tuple[Tensor, Tensor] | None


def _attend(backend: Backend) -> Callable[..., Tensor]:
    return sdpa_attention if backend == "sdpa" else attention


def make_norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    """Return a LayerNorm (Ba et al. 2016) or RMSNorm (Zhang and Sennrich 2019) of this width, by default M.

    The identity for norm="none".
    """
    if config.norm == "none":
        return nn.Identity()
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return kind(width or config.d_model, eps=config.norm_eps)


class FeedForward(nn.Module):
    """Feed-forward act(x W1) W2, or gated (act(x W1) * (x V)) W2 with W1 and V in one matrix; [..., M] -> [..., M].

    Vaswani et al. 2017, section 3.3; gated variants: Shazeer 2020.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.gated
        self.inner = nn.Linear(config.d_model, config.d_ff * (2 if config.gated else 1), bias=config.bias)
        self.outer = nn.Linear(config.d_ff, config.d_model, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.dropout if config.activation_dropout else 0.0)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply to hidden [..., M]; returns the same shape."""
        inner = self.inner(hidden)
        if self.gated:
            gate, linear = inner.chunk(2, dim=-1)
            return self.outer(self.dropout(self.activation(gate) * linear))  # type: ignore[no-any-return]
        return self.outer(self.dropout(self.activation(inner)))  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """Self-attention (Vaswani et al. 2017, section 3.2); one matrix of width 3 H D projects queries, keys, values."""

    def __init__(self, config: ModelConfig, num_heads: int, *, causal: bool, backend: Backend) -> None:
        super().__init__()
        self.heads = (num_heads, config.resolved_head_dim)
        width = num_heads * config.resolved_head_dim
        self.scale = config.resolved_attention_scale
        self.cap = config.attention_cap or 0.0
        self.causal = causal
        self.rope_theta = config.rope_theta if config.positions == "rope" else None
        self.rope_scaling = config.rope_scaling
        self.qkv = nn.Linear(config.d_model, 3 * width, bias=config.bias)
        self.out = nn.Linear(width, config.d_model, bias=config.bias)
        self.relative = PositionProjections(config, config.disentangled) if config.disentangled is not None else None
        self.attend = _attend(backend)

    def _project(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (part.unflatten(-1, self.heads) for part in self.qkv(hidden).chunk(3, dim=-1))
        if self.rope_theta is not None:
            cos, sin = rotary_tables(positions, self.heads[1], self.rope_theta, self.rope_scaling)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        return query, key, value

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        lens: Tensor | None,
        bias: Tensor | None,
        relative: Relative = None,
        cache: SelfCache | None = None,
    ) -> Tensor:
        """Attend over the whole sequence, or over a cache to which the new tokens are appended. Returns [B, T, M].

        hidden [B, T, M]; positions [1 or B, T]; lens [B] int32, None without padding; bias as in ops/attention.py.
        relative: for disentangled attention the table [P, M] and its row numbers [T, T], see ops/disentangled.py.
        """
        query, key, value = self._project(hidden, positions)
        if self.relative is not None and relative is not None:
            table, rows = relative
            position_keys, position_queries = self.relative(table, self.qkv)
            bias = position_scores(query, key, position_keys, position_queries, rows) * self.scale
        if cache is None:
            attended = self.attend(query, key, value, lens, bias, causal=self.causal, scale=self.scale, cap=self.cap)
        else:
            attended, cache.keys, cache.values = cached_attention(
                query, key, value, cache.keys, cache.values, cache.lens, bias, scale=self.scale, cap=self.cap
            )
        return self.out(attended.flatten(-2))  # type: ignore[no-any-return]


class Recurrence(nn.Module, ABC):
    """Reader of the tokens before in place of self-attention: a state of the size of one token follows each token."""

    @abstractmethod
    def states(self, hidden: Tensor, positions: Tensor, before: Tensor | None) -> Tensor:
        """Return the states [B, T, M] after each token of hidden [B, T, M] at positions [B, T] or [1, T].

        before: states [B, M] before the only token, T = 1; None: the first token is at position 0.
        """

    @abstractmethod
    def output(self, hidden: Tensor, states: Tensor) -> Tensor:
        """Return the sublayer's output for its input and the states after each token, all [..., M]."""

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        lens: Tensor | None,
        bias: Tensor | None,
        relative: Relative = None,
        cache: SelfCache | None = None,
    ) -> Tensor:
        """Read hidden [B, T, M] from left to right. Returns [B, T, M]. Other arguments as in SelfAttention.

        cache: its keys [B, 1, 1, M] are the state after the first lens tokens of each row, and are replaced; T = 1.
        """
        before = None
        if cache is not None:
            before = torch.where(cache.lens[:, None] > 0, cache.keys[:, 0, 0], 0.0)
        states = self.states(hidden, positions, before)
        if cache is not None:
            cache.keys = states[:, None]
        return self.output(hidden, states)


class SimpleRecurrence(Recurrence):
    """Simpler simple recurrent unit, SSRU (Kim et al. 2019, "From Research to Production and Back", section 3.2).

    One matrix of width 2 M projects candidate and forget gate; the candidate has no bias in Marian, here a zero one.
    The state is c = f c + (1 - f) candidate.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input = nn.Linear(config.d_model, 2 * config.d_model)
        self.max_len = config.max_target_len

    def states(self, hidden: Tensor, positions: Tensor, before: Tensor | None) -> Tensor:
        """Return c after each token."""
        candidate, gate = self.input(hidden).chunk(2, dim=-1)
        forget = torch.sigmoid(gate)
        update = (1 - forget) * candidate
        return _scan(forget, update, self.max_len) if before is None else forget * before[:, None] + update

    def output(self, hidden: Tensor, states: Tensor) -> Tensor:
        """Return relu(c)."""
        return torch.relu(states)


def _scan(factors: Tensor, terms: Tensor, max_len: int) -> Tensor:
    """Return y [B, T, M] with y[t] = factors[t] y[t - 1] + terms[t] and y[-1] = 0, for T of at most max_len.

    Doubling, since graphs with a free T can have no loop over it: after the pass for a shift, y[t] has the terms of the
    last 2 * shift positions, and factors[t] the product of their factors (Hillis and Steele 1986).
    """
    length, shift = terms.shape[1], 1
    while shift < max_len:
        terms = terms + factors * nn.functional.pad(terms, (0, 0, shift, 0))[:, :length]
        factors = factors * nn.functional.pad(factors, (0, 0, shift, 0))[:, :length]
        shift *= 2
    return terms


class AverageAttention(Recurrence):
    """Average attention (Zhang et al. 2018, section 3.1): cumulative average, then feed-forward and gates."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        kind, width = config.resolved_average, config.d_model
        inner = dict(d_ff=kind.d_ff, activation=kind.activation, gated=False)
        self.feed_forward = FeedForward(config.model_copy(update=inner)) if kind.d_ff is not None else nn.Identity()
        self.input_gate = nn.Linear(width, width) if kind.gated else None
        self.average_gate = nn.Linear(width, width) if kind.gated else None

    def states(self, hidden: Tensor, positions: Tensor, before: Tensor | None) -> Tensor:
        """Return the averages of all tokens so far."""
        total = hidden.cumsum(dim=1) if before is None else before[:, None] * positions[..., None] + hidden
        return total / (positions[..., None] + 1)

    def output(self, hidden: Tensor, states: Tensor) -> Tensor:
        """Return the averages after feed-forward and gates."""
        update: Tensor = self.feed_forward(states)
        if self.input_gate is None or self.average_gate is None:
            return update
        gates: tuple[Tensor, Tensor] = self.input_gate(hidden).sigmoid(), self.average_gate(update).sigmoid()
        return gates[0] * hidden + gates[1] * update


class CrossAttention(nn.Module):
    """Cross-attention of the target to the encoded source; source keys and values are projected once."""

    def __init__(self, config: ModelConfig, num_heads: int, *, backend: Backend) -> None:
        super().__init__()
        self.heads = (num_heads, config.resolved_head_dim)
        width = num_heads * config.resolved_head_dim
        self.scale = config.resolved_attention_scale
        self.cap = config.attention_cap or 0.0
        self.query = nn.Linear(config.d_model, width, bias=config.bias)
        self.kv = nn.Linear(config.d_model, 2 * width, bias=config.bias)
        self.out = nn.Linear(width, config.d_model, bias=config.bias)
        self.attend = _attend(backend)

    def project_memory(self, memory: Tensor) -> KV:
        """Project memory [B, S, M] to keys and values, each [B, H, S, D] as in the cache."""
        key, value = (part.unflatten(-1, self.heads).transpose(1, 2) for part in self.kv(memory).chunk(2, dim=-1))
        return key, value

    def forward(self, hidden: Tensor, cross_kv: KV, source_lens: Tensor | None) -> Tensor:
        """Attend from hidden [B, T, M] to cross_kv, two of [B, H, S, D]. Returns [B, T, M].

        source_lens [B] int32; None without padding.
        """
        query = self.query(hidden).unflatten(-1, self.heads)
        key, value = (part.transpose(1, 2) for part in cross_kv)
        attended = self.attend(query, key, value, source_lens, None, causal=False, scale=self.scale, cap=self.cap)
        return self.out(attended.flatten(-2))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """Residual connection with dropout: x + f(norm(x)) (pre-norm) or norm(x + f(x)) (post-norm).

    Post-norm: Vaswani et al. 2017, section 3.1. With post_norms x + post(f(norm(x))), as in Gemma 2. With
    residual=False the terms x are left out.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.pre = config.norm_placement == "pre"
        self.post = make_norm(config) if config.post_norms else None
        self.adds = config.residual
        self.dropout = Dropout(config.dropout)

    def before(self, hidden: Tensor) -> Tensor:
        """Return the input of the sublayer f."""
        return self.norm(hidden) if self.pre else hidden

    def after(self, hidden: Tensor, update: Tensor) -> Tensor:
        """Return the sum of the residual and the sublayer's output, normalised for post-norm."""
        dropped: Tensor = self.dropout(update if self.post is None else self.post(update))
        added = hidden + dropped if self.adds else dropped
        return added if self.pre else self.norm(added)


class EncoderLayer(nn.Module):
    """Encoder layer: self-attention, then feed-forward; [B, S, M] -> [B, S, M]."""

    def __init__(self, config: ModelConfig, layer: int, backend: Backend) -> None:
        super().__init__()
        num_heads = config.resolved_module_heads.encoder_self[layer]
        self.self_attention = SelfAttention(config, num_heads, causal=False, backend=backend)
        self.feed_forward = FeedForward(config)
        self.self_residual = Residual(config)
        self.feed_forward_residual = Residual(config)

    @property
    def residuals(self) -> tuple[Residual, ...]:
        """Residual connections of the sublayers, in their order."""
        return self.self_residual, self.feed_forward_residual

    def forward(
        self, hidden: Tensor, positions: Tensor, lens: Tensor | None, bias: Tensor | None, relative: Relative = None
    ) -> Tensor:
        """Apply to hidden [B, S, M]; other arguments as in SelfAttention. Returns [B, S, M]."""
        residual = self.self_residual
        hidden = residual.after(hidden, self.self_attention(residual.before(hidden), positions, lens, bias, relative))
        residual = self.feed_forward_residual
        return residual.after(hidden, self.feed_forward(residual.before(hidden)))


class DecoderLayer(nn.Module):
    """Decoder layer: causal self-attention or recurrence, cross-attention in encoder-decoder models, feed-forward."""

    def __init__(self, config: ModelConfig, layer: int, backend: Backend) -> None:
        super().__init__()
        heads = config.resolved_module_heads
        self.self_attention: SelfAttention | SimpleRecurrence | AverageAttention
        if config.decoder_self == "attention":
            self.self_attention = SelfAttention(config, heads.decoder_self[layer], causal=True, backend=backend)
        elif config.decoder_self == "ssru":
            self.self_attention = SimpleRecurrence(config)
        else:
            self.self_attention = AverageAttention(config)
        self.feed_forward = FeedForward(config)
        self.self_residual = Residual(config)
        self.feed_forward_residual = Residual(config)
        has_source = config.architecture == "encoder-decoder"
        cross_heads = heads.decoder_cross[layer]
        self.cross_attention = CrossAttention(config, cross_heads, backend=backend) if has_source else None
        self.cross_residual = Residual(config) if has_source else None

    @property
    def residuals(self) -> tuple[Residual, ...]:
        """Residual connections of the sublayers, in their order."""
        cross = () if self.cross_residual is None else (self.cross_residual,)
        return self.self_residual, *cross, self.feed_forward_residual

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        bias: Tensor | None,
        cross_kv: KV | None,
        source_lens: Tensor | None,
        cache: SelfCache | None = None,
    ) -> Tensor:
        """Apply to target positions, hidden [B, T, M]: to all of them, or to those after a cache. Returns [B, T, M].

        cross_kv two of [B, H, S, D], None for a decoder-only model; source_lens [B] int32, None without padding.
        """
        residual = self.self_residual
        update = self.self_attention(residual.before(hidden), positions, None, bias, None, cache)
        hidden = residual.after(hidden, update)
        if self.cross_attention is not None and self.cross_residual is not None and cross_kv is not None:
            residual = self.cross_residual
            hidden = residual.after(hidden, self.cross_attention(residual.before(hidden), cross_kv, source_lens))
        residual = self.feed_forward_residual
        return residual.after(hidden, self.feed_forward(residual.before(hidden)))


def self_attention_of(layer: EncoderLayer | DecoderLayer) -> SelfAttention:
    """Return the self-attention of a layer, for models without a recurrence in its place."""
    assert isinstance(layer.self_attention, SelfAttention)
    return layer.self_attention
