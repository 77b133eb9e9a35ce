"""The eager Transformer compared with PyTorch's and transformers' implementations with the same weights."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BloomConfig, LlamaConfig, T5Config, T5ForConditionalGeneration
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from antiphon.architecture.config import LinearScaling, Llama3Scaling, ModelConfig, RopeScaling, preset
from antiphon.ops.activations import ACTIVATIONS
from antiphon.transformer.layers import DecoderLayer, EncoderLayer
from antiphon.transformer.positions import (
    AbsolutePositions,
    alibi_slopes,
    relative_bucket,
    rotary_tables,
    rotate,
    sinusoidal_table,
)
from antiphon.transformer.random_model import random_transformer
from antiphon.transformer.transformer import Transformer

TOLERANCE = 2e-5  # float32 with about a dozen matrix products in sequence; the order of additions differs


def randomised(module: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module.eval()


def copy_all(pairs: Iterator[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def encoder_pairs(theirs: Any, ours: Any) -> Iterator[tuple[Tensor, Tensor]]:
    yield theirs.self_attn.in_proj_weight, ours.self_attention.qkv.weight
    yield theirs.self_attn.in_proj_bias, ours.self_attention.qkv.bias
    for linear, mine in (
        (theirs.self_attn.out_proj, ours.self_attention.out),
        (theirs.linear1, ours.feed_forward.inner),
        (theirs.linear2, ours.feed_forward.outer),
        (theirs.norm1, ours.self_residual.norm),
        (theirs.norm2, ours.feed_forward_residual.norm),
    ):
        yield linear.weight, mine.weight
        yield linear.bias, mine.bias


def decoder_pairs(theirs: Any, ours: Any) -> Iterator[tuple[Tensor, Tensor]]:
    cross, residual = ours.cross_attention, ours.cross_residual
    yield theirs.self_attn.in_proj_weight, ours.self_attention.qkv.weight
    yield theirs.self_attn.in_proj_bias, ours.self_attention.qkv.bias
    yield theirs.multihead_attn.in_proj_weight, torch.cat((cross.query.weight, cross.kv.weight))
    yield theirs.multihead_attn.in_proj_bias, torch.cat((cross.query.bias, cross.kv.bias))
    for linear, mine in (
        (theirs.self_attn.out_proj, ours.self_attention.out),
        (theirs.multihead_attn.out_proj, cross.out),
        (theirs.linear1, ours.feed_forward.inner),
        (theirs.linear2, ours.feed_forward.outer),
        (theirs.norm1, ours.self_residual.norm),
        (theirs.norm2, residual.norm),
        (theirs.norm3, ours.feed_forward_residual.norm),
    ):
        yield linear.weight, mine.weight
        yield linear.bias, mine.bias


@pytest.mark.parametrize("norm_placement", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_layers_equal_those_of_pytorch(norm_placement: str, activation: str) -> None:
    config = preset("tiny", norm_placement=norm_placement, activation=activation)
    model = randomised(Transformer(config), seed=1)
    assert isinstance(model, Transformer)
    assert model.encoder is not None
    assert model.decoder is not None
    settings = dict(
        d_model=config.d_model, nhead=config.num_heads, dim_feedforward=config.d_ff, dropout=0.0, batch_first=True,
        activation=ACTIVATIONS[activation], norm_first=norm_placement == "pre",
    )  # fmt: skip
    encoder_layer, decoder_layer = model.encoder.layers[0], model.decoder.layers[0]
    assert isinstance(encoder_layer, EncoderLayer)
    assert isinstance(decoder_layer, DecoderLayer)
    their_encoder = nn.TransformerEncoderLayer(**settings).train()  # type: ignore[arg-type]  # train: no fast path
    their_decoder = nn.TransformerDecoderLayer(**settings).train()  # type: ignore[arg-type]
    copy_all(encoder_pairs(their_encoder, encoder_layer))
    copy_all(decoder_pairs(their_decoder, decoder_layer))

    generator = torch.Generator().manual_seed(2)
    source, target = torch.randn(3, 7, 32, generator=generator), torch.randn(3, 5, 32, generator=generator)
    lens = torch.tensor([7, 2, 4], dtype=torch.int32)
    padding = torch.arange(7)[None] >= lens[:, None]
    positions = torch.arange(7)[None]
    memory = encoder_layer(source, positions, lens, None)
    theirs = their_encoder(source, src_key_padding_mask=padding)
    torch.testing.assert_close(memory[~padding], theirs[~padding], atol=TOLERANCE, rtol=0)

    assert decoder_layer.cross_attention is not None
    cross_kv = decoder_layer.cross_attention.project_memory(memory)
    ours = decoder_layer(target, positions[:, :5], None, cross_kv, lens)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    theirs = their_decoder(target, memory, tgt_mask=causal, memory_key_padding_mask=padding)
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def t5_config(config: ModelConfig) -> T5Config:
    return T5Config(
        vocab_size=config.vocab_size, d_model=config.d_model, d_kv=config.resolved_head_dim, d_ff=config.d_ff,
        num_layers=config.encoder_layers, num_decoder_layers=config.decoder_layers, num_heads=config.num_heads,
        relative_attention_num_buckets=config.relative_buckets,
        relative_attention_max_distance=config.relative_max_distance, dropout_rate=0.0,
        layer_norm_epsilon=config.norm_eps, feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,  # transformers 5 still ties the weights, but does not scale the logits
    )  # type: ignore[call-arg]  # fmt: skip


def t5_pairs(theirs: Any, ours: Any) -> Iterator[tuple[Tensor, Tensor]]:
    yield theirs.shared.weight, ours.decoder.embedding.weight
    for stack, mine in ((theirs.encoder, ours.encoder), (theirs.decoder, ours.decoder)):
        yield stack.final_layer_norm.weight, mine.final_norm.weight
        yield stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight, mine.relative_bias.weight
        for block, layer in zip(stack.block, mine.layers, strict=True):
            yield from t5_layer_pairs(block.layer, layer)


def t5_layer_pairs(parts: Any, layer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    attention = parts[0].SelfAttention
    for name, weight in zip("qkv", layer.self_attention.qkv.weight.chunk(3), strict=True):
        yield getattr(attention, name).weight, weight
    yield attention.o.weight, layer.self_attention.out.weight
    yield parts[0].layer_norm.weight, layer.self_residual.norm.weight
    if len(parts) == 3:
        cross = parts[1].EncDecAttention
        key, value = layer.cross_attention.kv.weight.chunk(2)
        yield cross.q.weight, layer.cross_attention.query.weight
        yield cross.k.weight, key
        yield cross.v.weight, value
        yield cross.o.weight, layer.cross_attention.out.weight
        yield parts[1].layer_norm.weight, layer.cross_residual.norm.weight
    gate, linear = layer.feed_forward.inner.weight.chunk(2)
    dense = parts[-1].DenseReluDense
    yield dense.wi_0.weight, gate
    yield dense.wi_1.weight, linear
    yield dense.wo.weight, layer.feed_forward.outer.weight
    yield parts[-1].layer_norm.weight, layer.feed_forward_residual.norm.weight


def test_layer_without_residual_and_norm_is_its_two_sublayers_in_a_row() -> None:
    model = random_transformer(preset("tiny", residual=False, norm="none"))
    layer = model.get_submodule("encoder.layers.0")
    assert isinstance(layer, EncoderLayer)
    hidden, positions = torch.randn(2, 5, 32), torch.arange(5)[None]
    expected = layer.feed_forward(layer.self_attention(hidden, positions, None, None))
    torch.testing.assert_close(layer(hidden, positions, None, None), expected, atol=0, rtol=0)


def test_t5_shape_equals_transformers() -> None:
    """T5 has RMSNorm, gated GELU, relative bias, no biases, no attention scale and a separate head width."""
    config = preset(
        "tiny", norm="rmsnorm", norm_placement="pre", norm_eps=1e-6, gated=True, activation="gelu_tanh", bias=False,
        positions="t5_relative", relative_buckets=8, relative_max_distance=20, attention_scale=1.0, head_dim=6,
        scale_embeddings=False,
    )  # fmt: skip
    model = randomised(Transformer(config), seed=4)
    assert isinstance(model, Transformer)
    theirs = T5ForConditionalGeneration(t5_config(config)).eval()  # type: ignore[no-untyped-call]
    copy_all(t5_pairs(theirs, model))
    generator = torch.Generator().manual_seed(6)
    source = torch.randint(4, 96, (3, 30), generator=generator)
    target = torch.randint(4, 96, (3, 26), generator=generator)
    lens = torch.tensor([30, 11, 3], dtype=torch.int32)
    mask = torch.arange(30)[None] < lens[:, None]
    with torch.no_grad():
        expected = theirs(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
        torch.testing.assert_close(model(source, target, lens), expected, atol=2e-4, rtol=1e-4)


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)


@pytest.mark.parametrize(
    ("rope_parameters", "scaling"),
    [
        (dict(rope_type="default"), None),
        (dict(rope_type="linear", factor=3.0), LinearScaling(factor=3.0)),
        (dict(rope_type="llama3", **LLAMA3), Llama3Scaling.model_validate(LLAMA3)),
    ],
    ids=["default", "linear", "llama3"],
)
def test_rotary_positions_equal_those_of_llama(rope_parameters: dict[str, Any], scaling: RopeScaling | None) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, 9, 4, 8, generator=generator) for _ in range(2))
    positions = torch.arange(3, 12)[None].expand(2, -1)
    llama = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, rope_parameters=rope_parameters | dict(rope_theta=1e4)
    )
    theirs_cos, theirs_sin = LlamaRotaryEmbedding(llama)(query, positions)
    expected = apply_rotary_pos_emb(query, key, theirs_cos, theirs_sin, unsqueeze_dim=2)
    cos, sin = rotary_tables(positions, 8, 1e4, scaling)
    torch.testing.assert_close((rotate(query, cos, sin), rotate(key, cos, sin)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [1, 4, 8, 12])
def test_alibi_slopes_equal_those_of_bloom(heads: int) -> None:
    config = BloomConfig(hidden_size=heads * 8, n_head=heads)
    theirs = build_alibi_tensor(torch.ones(1, 5, dtype=torch.long), config.n_head, torch.float32)
    expected = theirs.view(heads, 5)[:, 1] - theirs.view(heads, 5)[:, 0]
    torch.testing.assert_close(alibi_slopes(heads), expected)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_buckets_equal_those_of_t5(bidirectional: bool) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-300, 300)
    theirs = T5Attention._relative_position_bucket(  # type: ignore[no-untyped-call]
        distance, bidirectional, num_buckets=32, max_distance=128
    )
    ours = relative_bucket(distance, bidirectional=bidirectional, buckets=32, max_distance=128)
    torch.testing.assert_close(ours, theirs)


def test_sinusoidal_table_follows_the_formula_of_the_paper() -> None:
    table = sinusoidal_table(50, 6)
    for position in (0, 1, 49):
        for column in range(6):
            angle = torch.tensor(position / 10000 ** (2 * (column // 2) / 6), dtype=torch.float64)
            expected = angle.cos() if column % 2 else angle.sin()
            assert table[position, column].item() == pytest.approx(expected.item(), abs=1e-6)


def test_sines_in_halves_equal_those_of_marian() -> None:
    theirs = MarianSinusoidalPositionalEmbedding(300, 12)
    expected = theirs.create_weight()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(sinusoidal_table(300, 12, "halves"), expected, atol=1e-6, rtol=0)


def test_fairseq_sinusoids_behind_an_offset_equal_those_of_m2m_100() -> None:
    config = preset("tiny", max_source_len=300, sinusoids="fairseq", positions_offset=2)
    theirs = M2M100SinusoidalPositionalEmbedding(300, 32, padding_idx=1)
    expected = theirs(torch.full((1, 300), 5))[0]
    ours = AbsolutePositions(config, 300)(torch.zeros(1, 300, 32), torch.arange(300)[None])[0]
    # The angles of transformers are float32: their error is half a unit in the last place of 300.
    torch.testing.assert_close(ours, expected, atol=5e-5, rtol=0)


@pytest.mark.parametrize("positions", ["sinusoidal", "t5_relative", "alibi", "rope"])
def test_fused_attention_of_pytorch_equals_the_eager_reference(positions: str) -> None:
    """The fused kernel is the training backend for GPUs: causal, padded and cross attention, with and without bias."""
    config = preset("tiny", positions=positions)
    eager, fused = Transformer(config), Transformer(config, attention_backend="sdpa")
    fused.load_state_dict(randomised(eager, seed=8).state_dict())
    generator = torch.Generator().manual_seed(9)
    source, target = (torch.randint(4, 96, (3, n), generator=generator) for n in (11, 6))
    lens = torch.tensor([11, 4, 1], dtype=torch.int32)
    torch.testing.assert_close(fused.eval()(source, target, lens), eager(source, target, lens), atol=2e-4, rtol=1e-4)
