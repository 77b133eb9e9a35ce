"""The forward pass that is exported: encoder, decoder and heads over packed tokens, with caches in a pool of blocks.

Each module takes the submodules of a Transformer, shares their weights, and calls the operators of ops/operators: there
is no padding, and one operator computes a sublayer, the residual sum after it and the next norm. Tests compare the
results with the Transformer's own forward pass for every ModelConfig.

Axes: N packed tokens; B sources, R rows, X and Y table widths, M model width, H heads, D head width; K states that a
head reads, O its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.ops.disentangled import RelativePositions
from antiphon.ops.operators import rows as norms
from antiphon.ops.operators.attention import disentangled_attention, paged_write
from antiphon.ops.operators.linear import linear as product
from antiphon.ops.operators.recurrence import paged_average, ssru_sublayer
from antiphon.ops.operators.rows import embed
from antiphon.ops.operators.sample import sample
from antiphon.ops.operators.sublayers import (
    feed_forward_sublayer,
    packed_attention_sublayer,
    paged_cross_attention_sublayer,
    paged_self_attention_sublayer,
)
from antiphon.transformer.heads import Head
from antiphon.transformer.layers import (
    AverageAttention,
    CrossAttention,
    DecoderLayer,
    EncoderLayer,
    FeedForward,
    SelfAttention,
    SimpleRecurrence,
)
from antiphon.transformer.positions import rotary_table
from antiphon.transformer.transformer import Encoder, Stack, Transformer


class _PackedStack(nn.Module):
    """Base of encoder and decoder: a Stack's weights, tables and norms over packed tokens.

    `x` is the normed input of a sublayer, `stream` the sum of all sublayers so far, both [N, M]. Each operator ends
    with the norm after its sublayer: where norms come before sublayers (pre), that is the norm of the next one, and the
    final norm after the last.
    """

    bias_table: Tensor | None
    slopes: Tensor | None
    rotary_table: Tensor | None

    def __init__(
        self, config: ModelConfig, stack: Stack, layers: Sequence[EncoderLayer | DecoderLayer], max_len: int
    ) -> None:
        super().__init__()
        self.config = config
        self.stack = stack
        residuals = [residual for layer in layers for residual in layer.residuals]
        norms = [residual.norm for residual in residuals]
        self.pre = config.norm_placement == "pre"
        self.first_norm = norms[0] if self.pre else None
        norms_after = [*norms[1:], stack.final_norm] if self.pre else norms
        # Norm after each sum, and the norm of the sublayer's output before it, None without post_norms.
        self.norms_after = [(norm, residual.post) for norm, residual in zip(norms_after, residuals, strict=True)]
        self.cap = {"cap": config.attention_cap} if config.attention_cap else {}
        relative = stack.relative_bias
        table = relative.by_distance(min(config.relative_max_distance, max_len))
        slopes = relative.get_buffer("slopes") if config.positions == "alibi" else None
        rotary = None
        if config.positions == "rope":
            rotary = rotary_table(max_len, config.resolved_head_dim, config.rope_theta, config.rope_scaling)
        self.register_buffer("bias_table", table, persistent=False)
        self.register_buffer("slopes", slopes, persistent=False)
        self.register_buffer("rotary_table", rotary, persistent=False)

    def embed(self, input_ids: Tensor, positions: Tensor, type_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Embed input_ids [N] int64 at positions [N] int32; returns x and stream of the first sublayer.

        type_ids [N] int64 where tokens have types.
        """
        stack = self.stack
        embedded: Tensor = embed(
            input_ids, positions, stack.embedding.weight, stack.positions.vectors, scale=stack.embedding_scale
        )
        types = stack.token_types(type_ids) if stack.token_types is not None else None
        if self.config.embedding_norm:
            embedded, _ = self.add_norm(embedded, types, stack.embedding_norm)
        elif types is not None:
            embedded = embedded + types
        if isinstance(stack.widen, nn.Linear):
            embedded = linear(embedded, stack.widen)
        if self.first_norm is None:
            return embedded, embedded
        return self.add_norm(embedded, None, self.first_norm)[0], embedded

    def run(
        self,
        sublayer: Callable[..., tuple[Tensor, Tensor]],
        x: Tensor,
        stream: Tensor,
        norms: tuple[nn.Module, nn.Module | None],
        *args: object,
    ) -> tuple[Tensor, Tensor]:
        """Run a sublayer with a pair of norms_after; returns x and stream after it.

        With post_norms the operator adds nothing: its norm is that of the sublayer's output, and a second one adds.
        """
        norm, post = norms
        if post is None:
            return sublayer(x, stream, norm, *args)
        update, _ = sublayer(x, torch.zeros_like(stream), post, *args)
        return self.add_norm(update, stream, norm)

    def feed_forward(self, x: Tensor, stream: Tensor, norm: nn.Module, part: FeedForward) -> tuple[Tensor, Tensor]:
        """Run a feed-forward sublayer; returns x and stream after it."""
        return self.after(
            feed_forward_sublayer(
                x,
                stream,
                *_parameters(part.inner),
                *_parameters(part.outer),
                *_parameters(norm),
                activation=self.config.activation,
                gated=self.config.gated,
                **self.norm_attributes(norm),
            )
        )

    def after(self, outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return x and stream after a sublayer, from the norm and the sum that its operator returns."""
        normed, total = outputs
        return normed, total if self.pre else normed

    def add_norm(self, update: Tensor, stream: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """Return norm(stream + update) and the sum itself, both [N, M]."""
        return add_norm(update, stream, norm, self.config.norm_eps)

    def norm_attributes(self, norm: nn.Module) -> dict[str, Any]:
        """Return the attributes of a norm as keywords."""
        return {"epsilon": self.config.norm_eps, "kind": _kind(norm)}


def linear(x: Tensor, layer: nn.Linear, activation: str = "none") -> Tensor:
    """Return activation(layer(x)), computed by one operator; [N, K] -> [N, O]."""
    return product(  # type: ignore[no-any-return]
        x, layer.weight, layer.bias, activation=activation
    )


def add_norm(update: Tensor, stream: Tensor | None, norm: nn.Module, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return norm(stream + update) and the sum itself, both [N, M], computed by one operator."""
    normed, total = norms.add_norm(update, stream, *_parameters(norm), epsilon=epsilon, kind=_kind(norm))
    return normed, total


def _parameters(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a product or a norm."""
    return module.get_parameter("weight"), getattr(module, "bias", None)


def _kind(norm: nn.Module) -> str:
    return "layer" if isinstance(norm, nn.LayerNorm) else "rms"


class PackedStates(_PackedStack):
    """Encoder from sources to states; the whole graph of an encoder-only model."""

    def __init__(self, model: Transformer) -> None:
        assert model.encoder is not None
        max_len = model.config.max_source_len
        layers = tuple(layer for layer in model.encoder.layers if isinstance(layer, EncoderLayer))
        super().__init__(model.config, model.encoder, layers, max_len)
        self.blocks = layers
        self.relative = relative_tables(model.encoder, max_len)

    def forward(self, input_ids: Tensor, positions: Tensor, offsets: Tensor, type_ids: Tensor | None = None) -> Tensor:
        """Return the memory [N, M] of B packed sources.

        input_ids [N] int64; positions [N] int32; offsets [B + 1] int32; type_ids [N] int64, None where tokens have no
        types.
        """
        x, stream = self.embed(input_ids, positions, type_ids)
        norms = iter(self.norms_after)
        for index, layer in enumerate(self.blocks):
            if self.relative:
                x, stream = self.run(self.disentangled_attention, x, stream, next(norms), index, offsets)
            else:
                attention = layer.self_attention
                x, stream = self.run(self.attention, x, stream, next(norms), attention, positions, offsets)
            x, stream = self.run(self.feed_forward, x, stream, next(norms), layer.feed_forward)
        return x

    def attention(
        self, x: Tensor, stream: Tensor, norm: nn.Module, attention: SelfAttention, positions: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run a self-attention sublayer; returns x and stream after it."""
        return self.after(
            packed_attention_sublayer(
                x,
                stream,
                *_parameters(attention.qkv),
                *_parameters(attention.out),
                *_parameters(norm),
                offsets,
                self.bias_table,
                self.slopes,
                None if self.rotary_table is None else positions,
                self.rotary_table,
                num_heads=attention.heads[0],
                scale=attention.scale,
                causal=False,
                **self.cap,
                **self.norm_attributes(norm),
            )
        )

    def disentangled_attention(
        self, x: Tensor, stream: Tensor, norm: nn.Module, layer: int, offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run a sublayer of disentangled attention, made of separate operators; returns x and stream after it."""
        attention, tables = self.blocks[layer].self_attention, self.relative[layer]
        assert isinstance(tables, RelativeTables)
        attended = disentangled_attention(
            linear(x, attention.qkv),
            offsets,
            tables.rows,
            tables.keys,
            tables.queries,
            num_heads=self.config.num_heads,
            scale=attention.scale,
        )
        return self.after(self.add_norm(linear(attended, attention.out), stream, norm))


class PackedHead(nn.Module):
    """Head of an encoder; it maps the states of the tokens that its task reads to outputs."""

    def __init__(self, head: Head, epsilon: float) -> None:
        super().__init__()
        self.head = head
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden [K, M] to outputs [K, O]."""
        head = self.head
        if head.transform is not None:
            hidden = linear(hidden, head.transform, head.config.activation)
        if head.norm is not None:
            hidden, _ = add_norm(hidden, None, head.norm, self.epsilon)
        return hidden if head.output is None else linear(hidden, head.output)


class PackedEncoder(nn.Module):
    """Encoder from sources to states and cross caches: it writes every decoder layer's keys and values to the pool."""

    def __init__(self, model: Transformer) -> None:
        assert model.decoder is not None
        super().__init__()
        self.states = PackedStates(model)
        blocks = model.decoder.blocks
        self.cross = nn.ModuleList(block.cross_attention.kv for block in blocks if block.cross_attention is not None)
        self.cross_heads = model.config.resolved_module_heads.decoder_cross

    def forward(
        self, input_ids: Tensor, positions: Tensor, offsets: Tensor, block_tables: Tensor, cache: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encode B packed sources and write them from position 0 of their blocks.

        input_ids [N] int64; positions [N] int32; offsets [B + 1] int32; block_tables [B, X] int32; cache as in
        ops/cache_geometry.py. Returns (written [1] int32: N, memory [N, M], the cache).
        """
        memory = self.states(input_ids, positions, offsets)
        written: Tensor | None = None
        for layer, (kv_projection, num_heads) in enumerate(zip(self.cross, self.cross_heads, strict=True)):
            assert isinstance(kv_projection, nn.Linear)
            kv = linear(memory, kv_projection)
            written, cache = paged_write(kv, cache, block_tables, offsets, written, num_heads=num_heads, layer=layer)
        assert written is not None
        return written, memory, cache


@dataclass(kw_only=True, slots=True)
class PagedRows:
    """Rows of one decoder step: positions of their new tokens, and the blocks of their caches.

    positions [N] int32, of each token in its row; offsets [R + 1] int32: the new tokens of row r; self_tables [R, X],
    cross_tables [R, Y], source_lens [R] int32; cache as in ops/cache_geometry.py, replaced as layers append to it.
    """

    positions: Tensor
    offsets: Tensor
    self_tables: Tensor
    cross_tables: Tensor
    source_lens: Tensor
    cache: Tensor


class PagedDecoder(_PackedStack):
    """One step of every row: it appends any number of new tokens to the caches and samples the next tokens."""

    def __init__(self, model: Transformer) -> None:
        assert model.decoder is not None
        super().__init__(model.config, model.decoder, model.decoder.blocks, model.config.max_target_len)
        self.blocks = model.decoder.blocks
        self.output = model.output

    def forward(self, input_ids: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run one step.

        input_ids [N] int64; then the fields of PagedRows and the sampling parameters of `sample`, each in their order.
        Returns the outputs of `sample`, and the cache.
        """
        rows = PagedRows(**dict(zip(PagedRows.__slots__, tensors, strict=False)))
        hidden = self.step(input_ids, rows)
        params = tensors[len(PagedRows.__slots__) :]
        cap = {"cap": self.config.output_cap} if self.config.output_cap else {}
        samples = sample(hidden, self.output.weight, rows.positions, *params, self.output.bias, **cap)
        return (*samples, rows.cache)

    def step(self, input_ids: Tensor, rows: PagedRows) -> Tensor:
        """Return hidden states [N, M] of the new tokens, and replace the rows' cache."""
        x, stream = self.embed(input_ids, rows.positions)
        norms = iter(self.norms_after)
        for index, layer in enumerate(self.blocks):
            x, stream = self.run(self.read_before, x, stream, next(norms), layer.self_attention, rows, index)
            if layer.cross_attention is not None:
                cross = layer.cross_attention
                x, stream = self.run(self.cross_attention, x, stream, next(norms), cross, rows, index)
            x, stream = self.run(self.feed_forward, x, stream, next(norms), layer.feed_forward)
        return x

    def read_before(
        self, x: Tensor, stream: Tensor, norm: nn.Module, part: nn.Module, rows: PagedRows, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Run the sublayer that reads the tokens before; returns x and stream after it."""
        if isinstance(part, SimpleRecurrence):
            return self.recurrence(x, stream, norm, part, rows, layer)
        if isinstance(part, AverageAttention):
            return self.average_attention(x, stream, norm, part, rows, layer)
        assert isinstance(part, SelfAttention)
        return self.self_attention(x, stream, norm, part, rows, layer)

    def self_attention(
        self, x: Tensor, stream: Tensor, norm: nn.Module, attention: SelfAttention, rows: PagedRows, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Append the new tokens to the cache and attend over it; returns x and stream after the sublayer."""
        normed, total, rows.cache = paged_self_attention_sublayer(
            x,
            stream,
            *_parameters(attention.qkv),
            *_parameters(attention.out),
            *_parameters(norm),
            rows.cache,
            rows.self_tables,
            rows.offsets,
            rows.positions,
            self.bias_table,
            self.slopes,
            self.rotary_table,
            num_heads=attention.heads[0],
            scale=attention.scale,
            layer=layer,
            **self.cap,
            **self.norm_attributes(norm),
        )
        return self.after((normed, total))

    def recurrence(
        self, x: Tensor, stream: Tensor, norm: nn.Module, recurrence: SimpleRecurrence, rows: PagedRows, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Continue each row's recurrence from its state in the cache; returns x and stream after the sublayer."""
        normed, total, rows.cache = ssru_sublayer(
            x,
            stream,
            *_parameters(recurrence.input),
            *_parameters(norm),
            rows.cache,
            rows.self_tables,
            rows.offsets,
            rows.positions,
            layer=layer,
            **self.norm_attributes(norm),
        )
        return self.after((normed, total))

    def average_attention(
        self, x: Tensor, stream: Tensor, norm: nn.Module, part: AverageAttention, rows: PagedRows, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Continue each row's average in the cache, made of separate operators; returns x and stream after it."""
        update, rows.cache = paged_average(x, rows.cache, rows.self_tables, rows.offsets, rows.positions, layer=layer)
        if isinstance(part.feed_forward, FeedForward):
            kind = self.config.resolved_average
            update = linear(linear(update, part.feed_forward.inner, kind.activation), part.feed_forward.outer)
        if part.input_gate is not None and part.average_gate is not None:
            update = linear(x, part.input_gate).sigmoid() * x + linear(update, part.average_gate).sigmoid() * update
        return self.after(self.add_norm(update, stream, norm))

    def cross_attention(
        self, x: Tensor, stream: Tensor, norm: nn.Module, attention: CrossAttention, rows: PagedRows, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Attend over the sources' keys and values in the cache; returns x and stream after the sublayer."""
        return self.after(
            paged_cross_attention_sublayer(
                x,
                stream,
                *_parameters(attention.query),
                *_parameters(attention.out),
                *_parameters(norm),
                rows.cache,
                rows.cross_tables,
                rows.offsets,
                rows.source_lens,
                num_heads=attention.heads[0],
                scale=attention.scale,
                layer=layer,
                **self.cap,
                **self.norm_attributes(norm),
            )
        )


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
