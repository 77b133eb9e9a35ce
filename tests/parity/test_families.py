"""Our models of public encoder-decoder families compared with transformers' models with the same weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from antiphon.architecture.config import ModelConfig
from antiphon.transformer.random_model import random_transformer
from tests.parity.exports import small_config

# For each family its settings in transformers, and the equivalent fields of ModelConfig.
FAMILIES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "Marian": (
        dict(activation_function="swish", scale_embedding=True),
        dict(activation="silu", sinusoids="halves", output_bias=True),
    ),
    "Bart": (
        dict(activation_function="gelu", scale_embedding=False),
        dict(
            activation="gelu", scale_embeddings=False, positions="learned", positions_offset=2, embedding_norm=True,
            output_bias=True,
        ),
    ),
    "MBart": (
        dict(activation_function="gelu", scale_embedding=True),
        dict(
            activation="gelu", positions="learned", positions_offset=2, embedding_norm=True, output_bias=True,
            norm_placement="pre",
        ),
    ),
    "M2M100": (
        dict(activation_function="relu", scale_embedding=True, dropout=0.0),
        dict(sinusoids="fairseq", positions_offset=2, norm_placement="pre"),
    ),
    "Pegasus": (
        dict(activation_function="relu", scale_embedding=True),
        dict(sinusoids="halves", output_bias=True, norm_placement="pre"),
    ),
}  # fmt: skip


def theirs_like(name: str, config: ModelConfig, settings: dict[str, object]) -> Any:
    """Return a random model of transformers with the sizes of ours."""
    sizes = dict(
        vocab_size=config.vocab_size, d_model=config.d_model, max_position_embeddings=config.max_source_len,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    for side in ("encoder", "decoder"):
        layers = {f"{side}_layers": config.encoder_layers, f"{side}_attention_heads": config.num_heads}
        sizes |= {**layers, f"{side}_ffn_dim": config.d_ff}
    described = getattr(transformers, f"{name}Config")(**sizes, **settings)
    kind = "MTModel" if name == "Marian" else "ForConditionalGeneration"
    return getattr(transformers, f"{name}{kind}")(described).eval()


def pairs(theirs: Any, ours: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor of transformers' model with the tensor of ours that is copied into it."""
    yield theirs.model.shared.weight, ours.decoder.embedding.weight
    if ours.output.bias is not None:
        yield theirs.final_logits_bias[0], ours.output.bias
    for stack, mine in ((theirs.model.encoder, ours.encoder), (theirs.model.decoder, ours.decoder)):
        if ours.config.positions == "learned":
            yield stack.embed_positions.weight, mine.positions.table
        if ours.config.embedding_norm:
            yield from both(stack.layernorm_embedding, mine.embedding_norm)
        if ours.config.norm_placement == "pre":
            yield from both(stack.layer_norm, mine.final_norm)
        for layer, my_layer in zip(stack.layers, mine.layers, strict=True):
            yield from layer_pairs(layer, my_layer)


def layer_pairs(theirs: Any, ours: Any) -> Iterator[tuple[Tensor, Tensor]]:
    attention, mine = theirs.self_attn, ours.self_attention
    yield from split((attention.q_proj, attention.k_proj, attention.v_proj), mine.qkv)
    yield from both(attention.out_proj, mine.out)
    yield from both(theirs.self_attn_layer_norm, ours.self_residual.norm)
    if hasattr(theirs, "encoder_attn"):
        attention, mine = theirs.encoder_attn, ours.cross_attention
        yield from both(attention.q_proj, mine.query)
        yield from split((attention.k_proj, attention.v_proj), mine.kv)
        yield from both(attention.out_proj, mine.out)
        yield from both(theirs.encoder_attn_layer_norm, ours.cross_residual.norm)
    yield from both(theirs.fc1, ours.feed_forward.inner)
    yield from both(theirs.fc2, ours.feed_forward.outer)
    yield from both(theirs.final_layer_norm, ours.feed_forward_residual.norm)


def split(theirs: Sequence[Any], ours: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each projection of transformers with its part of our concatenated projection."""
    for name in ("weight", "bias"):
        for projection, part in zip(theirs, getattr(ours, name).chunk(len(theirs)), strict=True):
            yield getattr(projection, name), part


def both(theirs: Any, ours: Any) -> Iterator[tuple[Tensor, Tensor]]:
    yield theirs.weight, ours.weight
    yield theirs.bias, ours.bias


@pytest.mark.parametrize("name", FAMILIES)
def test_model_equals_the_model_of_transformers(name: str) -> None:
    settings, choices = FAMILIES[name]
    config = small_config(max_source_len=40, max_target_len=40, **choices)
    ours = random_transformer(config, seed=4)
    theirs = theirs_like(name, config, settings)
    generator = torch.Generator().manual_seed(6)
    source, target = (torch.randint(4, config.vocab_size, (3, length), generator=generator) for length in (30, 26))
    lens = torch.tensor([30, 11, 3], dtype=torch.int32)
    mask = torch.arange(30)[None] < lens[:, None]
    with torch.no_grad():
        for held, mine in pairs(theirs, ours):
            held.copy_(mine)
        expected = theirs(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
        torch.testing.assert_close(ours(source, target, lens), expected, atol=2e-4, rtol=1e-4)
