"""Export of the explain graph, which takes a source and a target and returns the attention weights of every head.

Implements the Transformer's forward pass a second time, for every ModelConfig, with its attention weights as outputs.
The arithmetic is float32 at every precision; int8 weights are unpacked in the graph (explain_weights.py). The graph is
not on the path of ordinary requests, so the code prefers clarity to speed. Writes no file.

Axes: S source, T target, M model width, H heads, D head width, L encoder layers, Ld decoder layers.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from antiphon.model.bundle.explain_session import INPUTS, OUTPUTS, ExplainSession
from antiphon.model.bundle.manifest import Precision
from antiphon.model.config import ModelConfig
from antiphon.model.export.graphs.simplify import forget_shapes, simplify
from antiphon.model.export.graphs.trace import OPSET, quiet_exporter
from antiphon.model.export.verification.verify import VerificationError
from antiphon.model.export.weights.quantize import quantize_rows
from antiphon.model.ops.attention import visible_keys
from antiphon.model.transformer.layers import CrossAttention, EncoderLayer, SelfAttention
from antiphon.model.transformer.positions import rotary_tables, rotate
from antiphon.model.transformer.transformer import Stack, Transformer

# Sizes of the free axes: not 1 and not equal, or the tracer would take them for constants, or for one axis.
_EXAMPLE_SOURCE, _EXAMPLE_TARGET = 7, 11

# Largest difference of an attention weight, which is 0 to 1. float32 is summed in another order, as in verify.py.
TOLERANCE = 1e-4
_CASES = ((1, 1), (9, 4), (33, 17))


class ExplainModule(nn.Module):
    """Forward pass that returns the attention weights only; shares the parameters of a Transformer."""

    def __init__(self, model: Transformer) -> None:
        assert model.encoder is not None
        assert model.decoder is not None
        super().__init__()
        self.encoder, self.decoder = model.encoder, model.decoder

    def forward(self, source_ids: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the attention weights of one source and target.

        source_ids: [1, S] int64, end token included; target_ids: [1, T] int64, begin token first
        Returns encoder_self [L, H, S, S], decoder_self [Ld, H, T, T] and cross [Ld, H, T, S] float32. The weights of
        a query sum to 1; keys that it may not see have weight 0.
        """
        memory, encoder_self = self._encode(source_ids)
        decoder_self, cross = self._decode(target_ids, memory)
        return encoder_self, decoder_self, cross

    def _encode(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the memory [1, S, M] and the encoder's attention weights [L, H, S, S]."""
        hidden, positions, bias = _embedded(self.encoder, ids)
        maps = []
        for layer in self.encoder.layers:
            assert isinstance(layer, EncoderLayer)
            residual = layer.self_residual
            update, weights = _self_attention(layer.self_attention, residual.before(hidden), positions, bias)
            hidden = residual.after(hidden, update)
            residual = layer.feed_forward_residual
            hidden = residual.after(hidden, layer.feed_forward(residual.before(hidden)))
            maps.append(weights)
        return self.encoder.final_norm(hidden), torch.cat(maps)

    def _decode(self, ids: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the decoder's attention weights over itself [Ld, H, T, T] and over the source [Ld, H, T, S]."""
        hidden, positions, bias = _embedded(self.decoder, ids)
        self_maps, cross_maps = [], []
        for layer in self.decoder.blocks:
            residual = layer.self_residual
            update, weights = _self_attention(layer.self_attention, residual.before(hidden), positions, bias)
            hidden = residual.after(hidden, update)
            self_maps.append(weights)
            assert layer.cross_attention is not None
            assert layer.cross_residual is not None
            residual = layer.cross_residual
            update, weights = _cross_attention(layer.cross_attention, residual.before(hidden), memory)
            hidden = residual.after(hidden, update)
            cross_maps.append(weights)
            residual = layer.feed_forward_residual
            hidden = residual.after(hidden, layer.feed_forward(residual.before(hidden)))
        return torch.cat(self_maps), torch.cat(cross_maps)


def _embedded(stack: Stack, ids: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the embeddings [1, T, M], positions [1, T] and score bias [1, H, T, T] of one sequence."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return stack.embed(ids, positions), positions, stack.relative_bias(positions, ids.shape[1])


def _self_attention(
    attention: SelfAttention, hidden: Tensor, positions: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Map hidden [1, T, M] to the update [1, T, M] and the attention weights [1, H, T, T]."""
    query, key, value = (part.unflatten(-1, attention.heads) for part in attention.qkv(hidden).chunk(3, dim=-1))
    if attention.rope_theta is not None:
        cos, sin = rotary_tables(positions, attention.heads[1], attention.rope_theta, attention.rope_scaling)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    weights = _weights(query, key, bias, scale=attention.scale, causal=attention.causal)
    return _mixed(attention.out, weights, value), weights


def _cross_attention(attention: CrossAttention, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Map hidden [1, T, M] and memory [1, S, M] to the update [1, T, M] and the attention weights [1, H, T, S]."""
    query = attention.query(hidden).unflatten(-1, attention.heads)
    key, value = (part.unflatten(-1, attention.heads) for part in attention.kv(memory).chunk(2, dim=-1))
    weights = _weights(query, key, None, scale=attention.scale, causal=False)
    return _mixed(attention.out, weights, value), weights


def _weights(query: Tensor, key: Tensor, bias: Tensor | None, *, scale: float, causal: bool) -> Tensor:
    """Return softmax(scale * Q K^T + bias) [1, H, T, S] of query [1, T, H, D] and key [1, S, H, D]."""
    scores = torch.matmul(query.transpose(1, 2), key.permute(0, 2, 3, 1)) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        seen = visible_keys(query.shape[1], key.shape[1], None, causal=True, device=query.device)
        scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(dim=-1)


def _mixed(out: nn.Linear, weights: Tensor, value: Tensor) -> Tensor:
    """Mix values [1, S, H, D] by weights [1, H, T, S] and project them to [1, T, M]."""
    mixed: Tensor = out(torch.matmul(weights, value.transpose(1, 2)).transpose(1, 2).flatten(-2))
    return mixed


def trace_explain(model: Transformer) -> ir.Model:
    """Return the explain graph in float32; its products read constants [K, O]."""
    ids = (torch.ones(1, _EXAMPLE_SOURCE, dtype=torch.int64), torch.ones(1, _EXAMPLE_TARGET, dtype=torch.int64))
    with quiet_exporter(), torch.no_grad():
        program = torch.onnx.export(
            ExplainModule(model).eval(),
            ids,
            dynamo=True,
            input_names=INPUTS,
            output_names=OUTPUTS,
            dynamic_shapes=({1: "source"}, {1: "target"}),
            opset_version=OPSET,
            verbose=False,
        )
    assert program is not None
    simplify(program.model)
    forget_shapes(program.model.graph)
    return program.model


def verify_explain(path: Path, model: Transformer, precision: Precision, *, seed: int = 0) -> float:
    """Compare an explain graph with PyTorch in float32, weights rounded as in the graph; returns the largest error.

    Raises VerificationError when an attention weight is off by more than TOLERANCE.
    """
    reference = ExplainModule(rounded(model, precision)).eval()
    session = ExplainSession(path)
    random = np.random.default_rng(seed)
    worst = max(_error(session, reference, model.config, lens, random) for lens in _CASES)
    if not worst <= TOLERANCE:
        raise VerificationError(
            f"{path.name} disagrees with the model: an attention weight is off by {worst:.1e}, "
            f"at most {TOLERANCE:.0e} is allowed"
        )
    return worst


def _error(
    session: ExplainSession,
    reference: ExplainModule,
    config: ModelConfig,
    lens: tuple[int, int],
    random: np.random.Generator,
) -> float:
    """Return the largest difference over the three outputs, or nan, for a random source and target of these lengths."""
    limits = (config.max_source_len, config.max_target_len)
    vocabularies = (config.resolved_source_vocab_size, config.vocab_size)
    ids = [random.integers(0, size, min(pair)) for size, *pair in zip(vocabularies, lens, limits, strict=True)]
    found = session.run(*(row.tolist() for row in ids))
    with torch.no_grad():
        expected = reference(*(torch.from_numpy(row)[None] for row in ids))
    pairs = zip((found.encoder_self, found.decoder_self, found.cross), expected, strict=True)
    return float(np.max([np.abs(ours - theirs.numpy()).max() for ours, theirs in pairs]))


@torch.no_grad()
def rounded(model: Transformer, precision: Precision) -> Transformer:
    """Return a copy whose products and token embeddings are rounded as the precision stores them (quantize.py)."""
    twin = deepcopy(model).eval()
    if precision == "float32":
        return twin
    for weight in {module.weight for module in twin.modules() if isinstance(module, nn.Linear | nn.Embedding)}:
        integers, scales = quantize_rows(weight.numpy())
        weight.copy_(torch.from_numpy(integers * scales[:, None]))
    return twin
