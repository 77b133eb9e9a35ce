"""Transformer (Vaswani et al. 2017 and common variants): stack, encoder, decoder and model, as ModelConfig describes.

Layers are in layers.py, heads of encoder-only models in heads.py.

Axes: B batch, S source, T target, M model width, W width of the embeddings (M, or ModelConfig.embedding_width),
H heads, D head width, C cache capacity, V vocabulary, K states for a head, O outputs of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import Task
from antiphon.ops.attention import Backend, capped
from antiphon.ops.disentangled import RelativePositions
from antiphon.transformer.dropout import Dropout
from antiphon.transformer.heads import Head
from antiphon.transformer.layers import KV, DecoderLayer, EncoderLayer, SelfCache, make_norm
from antiphon.transformer.positions import AbsolutePositions, RelativeBias


class Stack(nn.Module):
    """Base of encoder and decoder: embedding, positions, score bias, layers, and the norms before and after them."""

    relative_bias: RelativeBias

    def __init__(self, config: ModelConfig, embedding: nn.Embedding, layers: Sequence[nn.Module], max_len: int) -> None:
        super().__init__()
        self.embedding = embedding
        self.embedding_scale = math.sqrt(config.d_model) if config.scale_embeddings else 1.0
        self.positions = AbsolutePositions(config, max_len)
        width = config.resolved_embedding_width
        self.token_types = nn.Embedding(config.token_types, width) if config.token_types else None
        self.embedding_norm = make_norm(config, width) if config.embedding_norm else nn.Identity()
        self.widen = nn.Linear(width, config.d_model) if config.embedding_width is not None else nn.Identity()
        self.layers = nn.ModuleList(layers)
        self.final_norm = make_norm(config) if config.norm_placement == "pre" else nn.Identity()
        self.dropout = Dropout(config.dropout)
        self.checkpoint_layers = False

    def embed(self, ids: Tensor, positions: Tensor, type_ids: Tensor | None = None) -> Tensor:
        """Return the input of the first layer, [B, T, M].

        ids [B, T] int64; positions [B or 1, T]; type_ids [B, T] int64, None: type 0 for all tokens.
        """
        embedded = self.positions(self.embedding(ids) * self.embedding_scale, positions)  # [B, T, W]
        if self.token_types is not None:
            embedded = embedded + self.token_types(torch.zeros_like(ids) if type_ids is None else type_ids)
        return self.widen(self.dropout(self.embedding_norm(embedded)))  # type: ignore[no-any-return]

    def run(self, layer: nn.Module, *args: object) -> Tensor:
        """Run one layer; with gradient checkpointing the backward pass computes it again (Chen et al. 2016)."""
        if self.checkpoint_layers and torch.is_grad_enabled():
            return checkpoint(layer, *args, use_reentrant=False)  # type: ignore[no-any-return]
        return layer(*args)  # type: ignore[no-any-return]


class Encoder(Stack):
    """Encoder: token ids [B, S] -> memory [B, S, M]."""

    def __init__(self, config: ModelConfig, embedding: nn.Embedding, backend: Backend) -> None:
        count = 1 if config.share_layers else config.encoder_layers
        layers = [EncoderLayer(config, layer, backend) for layer in range(count)] * (config.encoder_layers // count)
        super().__init__(config, embedding, layers, config.max_source_len)
        self.relative_bias = RelativeBias(config, bidirectional=True)
        kind = config.disentangled
        self.relative_positions = RelativePositions(config, kind) if kind is not None else None

    def forward(self, ids: Tensor, lens: Tensor | None, type_ids: Tensor | None = None) -> Tensor:
        """Return memory [B, S, M]; ids, type_ids [B, S] int64; lens [B] int32, None without padding."""
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        hidden = self.embed(ids, positions, type_ids)
        bias = self.relative_bias(positions, ids.shape[1])
        relative = self.relative_positions(ids.shape[1]) if self.relative_positions is not None else None
        for layer in self.layers:
            hidden = self.run(layer, hidden, positions, lens, bias, relative)
        return self.final_norm(hidden)  # type: ignore[no-any-return]


class Decoder(Stack):
    """Decoder: token ids [B, T] and the source's keys and values -> hidden states [B, T, M]."""

    def __init__(self, config: ModelConfig, embedding: nn.Embedding, backend: Backend) -> None:
        layers = [DecoderLayer(config, layer, backend) for layer in range(config.decoder_layers)]
        super().__init__(config, embedding, layers, config.max_target_len)
        self.relative_bias = RelativeBias(config, bidirectional=False)

    @property
    def blocks(self) -> tuple[DecoderLayer, ...]:
        """Layers with their static type."""
        return tuple(layer for layer in self.layers if isinstance(layer, DecoderLayer))

    def forward(
        self,
        ids: Tensor,
        cross_kv: Sequence[KV] | None,
        source_lens: Tensor | None,
        caches: Sequence[SelfCache] | None = None,
    ) -> Tensor:
        """Return hidden states [B, T, M] of all positions, or with caches of new tokens behind those of each row.

        ids [B, T] int64, with caches T = 1. See Transformer.decode and Transformer.step.
        """
        if caches is None:
            positions, keys = torch.arange(ids.shape[1], device=ids.device)[None], ids.shape[1]
        else:
            positions, keys = caches[0].lens[:, None], caches[0].keys.shape[2]
        hidden = self.embed(ids, positions)
        bias = self.relative_bias(positions, keys)
        for index, layer in enumerate(self.layers):
            source_kv = cross_kv[index] if cross_kv is not None else None
            cache = caches[index] if caches is not None else None
            hidden = self.run(layer, hidden, positions, bias, source_kv, source_lens, cache)
        return self.final_norm(hidden)  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Encoder, decoder or both. A decoder has an output projection; an encoder-only model has heads.

    attention_backend: "eager" or "sdpa", see ops/attention.py.
    """

    def __init__(self, config: ModelConfig, *, attention_backend: Backend = "eager") -> None:
        super().__init__()
        self.config = config
        target = nn.Embedding(config.vocab_size, config.resolved_embedding_width)
        source = target
        if not config.tie_source_target and config.architecture == "encoder-decoder":
            source = nn.Embedding(config.resolved_source_vocab_size, config.d_model)
        has_encoder, has_decoder = config.encoder_layers > 0, config.decoder_layers > 0
        self.encoder = Encoder(config, source, attention_backend) if has_encoder else None
        self.decoder = Decoder(config, target, attention_backend) if has_decoder else None
        if has_decoder:
            self.output = nn.Linear(config.d_model, config.vocab_size, bias=config.output_bias)
            if config.tie_output:
                self.output.weight = target.weight
        self.heads = nn.ModuleDict({head.task: Head(config, head, source) for head in config.heads})
        self._initialise()

    def _initialise(self) -> None:
        """Initialise matrices with Xavier uniform, embeddings with N(0, 1/M) and biases with zero."""
        embeddings = [module for module in self.modules() if isinstance(module, nn.Embedding)]
        tied = {id(embedding.weight) for embedding in embeddings}
        for module in self.modules():
            if isinstance(module, nn.Linear):
                if id(module.weight) not in tied:
                    nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.d_model**-0.5)

    @property
    def num_parameters(self) -> int:
        """Number of parameters; shared parameters count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def checkpoint_layers(self, enabled: bool) -> None:  # noqa: FBT001
        """Switch gradient checkpointing: training needs less activation memory and a second forward pass."""
        for stack in (self.encoder, self.decoder):
            if stack is not None:
                stack.checkpoint_layers = enabled

    def encode(self, source_ids: Tensor, source_lens: Tensor | None = None, type_ids: Tensor | None = None) -> Tensor:
        """Return memory [B, S, M] of the sources.

        source_ids [B, S] int64; source_lens [B] int32, None without padding; type_ids [B, S] int64 below
        ModelConfig.token_types, None: type 0 for all tokens.
        Raises ValueError if the model has no encoder.
        """
        if self.encoder is None:
            raise ValueError(f"architecture={self.config.architecture!r} has no encoder")
        return self.encoder(source_ids, source_lens, type_ids)  # type: ignore[no-any-return]

    def read_out(self, task: Task, hidden: Tensor) -> Tensor:
        """Return a head's outputs [K, O] for states [K, M] of the tokens that its task uses; see Head.

        Raises ValueError if the model has no head for the task.
        """
        if task not in self.heads:
            raise ValueError(f"the model has no head for {task!r}; its heads: {', '.join(self.heads) or 'none'}")
        return self.heads[task](hidden)  # type: ignore[no-any-return]

    def project_memory(self, memory: Tensor) -> tuple[KV, ...]:
        """Return cross keys and values, two of [B, H, S, D], for each decoder layer; memory [B, S, M].

        Raises ValueError if the model has no decoder.
        """
        if self.decoder is None:
            raise ValueError(f"architecture={self.config.architecture!r} has no decoder")
        cross_attentions = (block.cross_attention for block in self.decoder.blocks)
        return tuple(cross.project_memory(memory) for cross in cross_attentions if cross is not None)

    def decode(self, target_ids: Tensor, cross_kv: Sequence[KV] | None, source_lens: Tensor | None = None) -> Tensor:
        """Return hidden states [B, T, M] of all positions (teacher forcing).

        target_ids [B, T] int64, begin token first; source_lens [B] int32, None without padding.
        Raises ValueError if the model has no decoder.
        """
        if self.decoder is None:
            raise ValueError(f"architecture={self.config.architecture!r} has no decoder")
        return self.decoder(target_ids, cross_kv, source_lens)  # type: ignore[no-any-return]

    def step(
        self,
        token_ids: Tensor,
        past_lens: Tensor,
        self_kv: Sequence[KV],
        cross_kv: Sequence[KV] | None,
        source_lens: Tensor | None,
    ) -> tuple[Tensor, tuple[KV, ...]]:
        """Run one new token a row; rows can have different lengths.

        token_ids [B, 1] int64; past_lens [B] int32: number of cached tokens, which is the new token's position;
        self_kv, cross_kv: for each layer keys and values [B, H, C, D]; source_lens [B] int32: number of valid cross
        keys. Returns hidden [B, 1, M] and new self caches with the token; the inputs do not change.
        Raises ValueError if the model has no decoder.
        """
        if self.decoder is None:
            raise ValueError(f"architecture={self.config.architecture!r} has no decoder")
        caches = [SelfCache(keys, values, past_lens) for keys, values in self_kv]
        hidden = self.decoder(token_ids, cross_kv, source_lens, caches)
        return hidden, tuple((cache.keys, cache.values) for cache in caches)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden [..., M]; a tied projection is the embedding (section 3.4).

        Raises ValueError if the model has no decoder.
        """
        if self.decoder is None:
            raise ValueError(f"architecture={self.config.architecture!r} has no output projection; see read_out")
        return capped(self.output(hidden), self.config.output_cap or 0.0)

    def forward(self, source_ids: Tensor, target_ids: Tensor, source_lens: Tensor | None = None) -> Tensor:
        """Return logits [B, T, V] of the next target token at each position; source_ids [B, S], target_ids [B, T]."""
        cross_kv = self.project_memory(self.encode(source_ids, source_lens))
        return self.logits(self.decode(target_ids, cross_kv, source_lens))
