"""The Transformer's encoder, decoder and heads as the native lowering runs them: packed tokens, caches in a block pool.

Each module takes the submodules of a Transformer, shares their weights, and implements the forward pass with the
operators of ops/operators: without padding, and with one operator for a sublayer, the residual sum after it and the
next norm. Tests compare the results with the Transformer's own forward pass for every ModelConfig.

Axes: N packed tokens; B sources, R rows, X and Y table widths, M model width, H heads, D head width; K states that a
head reads, O its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.export.graphs.relative_tables import RelativeTables, relative_tables
from antiphon.ops.operators import rows as norms
from antiphon.ops.operators.attention import disentangled_attention, paged_write
from antiphon.ops.operators.linear import linear as product
from antiphon.ops.operators.rows import embed
from antiphon.ops.operators.sample import sample
from antiphon.ops.operators.sublayers import (
    feed_forward_sublayer,
    packed_attention_sublayer,
    paged_cross_attention_sublayer,
    paged_self_attention_sublayer,
)
from antiphon.transformer.heads import Head
from antiphon.transformer.layers import CrossAttention, EncoderLayer, FeedForward, Residual, SelfAttention
from antiphon.transformer.positions import rotary_table
from antiphon.transformer.transformer import Stack, Transformer

Sublayer = Callable[[Tensor, Tensor, nn.Module], tuple[Tensor, Tensor]]
"""Maps normed states and the residual stream, both [N, M], with the norm that follows the sublayer, to both again."""


def _rotary_table(config: ModelConfig, max_len: int) -> Tensor:
    return rotary_table(max_len, config.resolved_head_dim, config.rope_theta, config.rope_scaling)


class _PackedStack(nn.Module):
    """Base of encoder and decoder: a Stack's weights and tables, and its residual stream over packed tokens."""

    bias_table: Tensor | None
    slopes: Tensor | None
    rotary_table: Tensor | None

    def __init__(self, config: ModelConfig, stack: Stack, max_len: int) -> None:
        super().__init__()
        self.config = config
        self.stack = stack
        relative = stack.relative_bias
        table = relative.by_distance(min(config.relative_max_distance, max_len))
        slopes = relative.get_buffer("slopes") if config.positions == "alibi" else None
        rotary = _rotary_table(config, max_len) if config.positions == "rope" else None
        self.register_buffer("bias_table", table, persistent=False)
        self.register_buffer("slopes", slopes, persistent=False)
        self.register_buffer("rotary_table", rotary, persistent=False)

    def embed(self, input_ids: Tensor, positions: Tensor, type_ids: Tensor | None = None) -> Tensor:
        """Embed input_ids [N] int64 at positions [N] int32, with type_ids [N] int64 where tokens have types; [N, M]."""
        stack = self.stack
        embedded: Tensor = embed(
            input_ids, positions, stack.embedding.weight, stack.positions.vectors, scale=stack.embedding_scale
        )
        types = stack.token_types(type_ids) if stack.token_types is not None else None
        if self.config.embedding_norm:
            embedded, _ = self.add_norm(embedded, types, stack.embedding_norm)
        elif types is not None:
            embedded = embedded + types
        return linear(embedded, stack.widen) if isinstance(stack.widen, nn.Linear) else embedded

    def run(self, hidden: Tensor, sublayers: Sequence[tuple[Sublayer, Residual]]) -> Tensor:
        """Run every sublayer with its residual: hidden [N, M] -> [N, M], with the norms of the Stack."""
        norms = [residual.norm for _, residual in sublayers]
        pre, normed, stream = self.config.norm_placement == "pre", hidden, hidden
        if pre:
            normed, _ = self.add_norm(hidden, None, norms[0])
            norms = [*norms[1:], self.stack.final_norm]
        for (sublayer, _), norm in zip(sublayers, norms, strict=True):
            normed, total = sublayer(normed, stream, norm)
            stream = total if pre else normed
        return normed

    def add_norm(self, update: Tensor, stream: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """Return norm(stream + update) and the sum itself, both [N, M]."""
        return add_norm(update, stream, norm, self.config.norm_eps)

    def norm_attributes(self, norm: nn.Module) -> dict[str, Any]:
        """Return the attributes of a norm as keywords."""
        return {"epsilon": self.config.norm_eps, "kind": _kind(norm)}

    def feed_forward(self, part: FeedForward) -> Sublayer:
        """Return the feed-forward sublayer."""

        def forward(normed: Tensor, stream: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
            return feed_forward_sublayer(  # type: ignore[no-any-return]
                normed,
                stream,
                *_parameters(part.inner),
                *_parameters(part.outer),
                *_parameters(norm),
                activation=self.config.activation,
                gated=self.config.gated,
                **self.norm_attributes(norm),
            )

        return forward


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
        super().__init__(model.config, model.encoder, model.config.max_source_len)
        self.blocks = tuple(layer for layer in model.encoder.layers if isinstance(layer, EncoderLayer))
        self.relative = relative_tables(model.encoder, model.config.max_source_len)

    def forward(self, input_ids: Tensor, positions: Tensor, offsets: Tensor, type_ids: Tensor | None = None) -> Tensor:
        """Return the memory [N, M] of B packed sources.

        input_ids [N] int64; positions [N] int32; offsets [B + 1] int32; type_ids [N] int64, None where tokens have no
        types.
        """
        sublayers: list[tuple[Sublayer, Residual]] = []
        for index, layer in enumerate(self.blocks):
            attend = self._attend if self._is_plain else self._attend_unfused
            sublayers.append((attend(index, positions, offsets), layer.self_residual))
            sublayers.append((self.feed_forward(layer.feed_forward), layer.feed_forward_residual))
        return self.run(self.embed(input_ids, positions, type_ids), sublayers)

    @property
    def _is_plain(self) -> bool:
        """True where the fused operator has everything that the attention needs."""
        return not self.relative

    def _attend(self, layer: int, positions: Tensor, offsets: Tensor) -> Sublayer:
        attention = self.blocks[layer].self_attention

        def forward(normed: Tensor, stream: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
            return packed_attention_sublayer(  # type: ignore[no-any-return]
                normed,
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
                **self.norm_attributes(norm),
            )

        return forward

    def _attend_unfused(self, layer: int, _positions: Tensor, offsets: Tensor) -> Sublayer:
        """Return the sublayer made of separate operators, for disentangled attention."""
        attention = self.blocks[layer].self_attention

        def forward(normed: Tensor, stream: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
            attended = self._attend_relative(layer, linear(normed, attention.qkv), offsets)
            return self.add_norm(linear(attended, attention.out), stream, norm)

        return forward

    def _attend_relative(self, layer: int, qkv: Tensor, offsets: Tensor) -> Tensor:
        tables = self.relative[layer]
        assert isinstance(tables, RelativeTables)
        return disentangled_attention(  # type: ignore[no-any-return]
            qkv,
            offsets,
            tables.rows,
            tables.keys,
            tables.queries,
            num_heads=self.config.num_heads,
            scale=self.blocks[layer].self_attention.scale,
        )


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
        super().__init__(model.config, model.decoder, model.config.max_target_len)
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
        samples = sample(hidden, self.output.weight, rows.positions, *params, self.output.bias)
        return (*samples, rows.cache)

    def step(self, input_ids: Tensor, rows: PagedRows) -> Tensor:
        """Return hidden states [N, M] of the new tokens, and replace the rows' cache."""
        sublayers: list[tuple[Sublayer, Residual]] = []
        for index, layer in enumerate(self.blocks):
            sublayers.append((self._attend(layer.self_attention, rows, index), layer.self_residual))
            if layer.cross_attention is not None and layer.cross_residual is not None:
                sublayers.append((self._attend_source(layer.cross_attention, rows, index), layer.cross_residual))
            sublayers.append((self.feed_forward(layer.feed_forward), layer.feed_forward_residual))
        return self.run(self.embed(input_ids, rows.positions), sublayers)

    def _attend(self, attention: SelfAttention, rows: PagedRows, layer: int) -> Sublayer:
        def forward(normed: Tensor, stream: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
            normed, total, rows.cache = paged_self_attention_sublayer(
                normed,
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
                **self.norm_attributes(norm),
            )
            return normed, total

        return forward

    def _attend_source(self, attention: CrossAttention, rows: PagedRows, layer: int) -> Sublayer:
        def forward(normed: Tensor, stream: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
            return paged_cross_attention_sublayer(  # type: ignore[no-any-return]
                normed,
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
                **self.norm_attributes(norm),
            )

        return forward
