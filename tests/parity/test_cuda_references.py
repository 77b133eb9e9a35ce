"""Eager references of the nodes for GPUs compared with those of the CPU operators, in float32."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from antiphon.ops.activations import ACTIVATIONS
from antiphon.ops.cache_geometry import BLOCK_SIZE, blocks_for
from antiphon.ops.cuda import PADDING, TILE, nodes, references
from antiphon.ops.operators import attention as eager_attention
from antiphon.ops.operators.linear import gate
from antiphon.ops.operators.rows import add_norm, embed
from antiphon.ops.sampling import FLOAT_PARAMS, INT_PARAMS, greedy_sampling
from antiphon.ops.sampling import sample as sample_in_numpy

HEADS, WIDTH, LAYERS = 2, 16, 2
STATES = HEADS * WIDTH
LENS = (1, 70, 16, 130)
TOLERANCE: dict[str, Any] = dict(atol=1e-5, rtol=1e-5)  # float32 sums in another order
BIASES = ("plain", "bias_table", "slopes")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ramp(lens: tuple[int, ...]) -> Tensor:
    return ints(0, *torch.tensor(lens).cumsum(0).tolist())


def score_biases(kind: str) -> tuple[Tensor | None, Tensor | None]:
    table = normal(HEADS, 41, seed=3) if kind == "bias_table" else None
    return table, normal(HEADS, seed=4).abs() if kind == "slopes" else None


def tables(lens: tuple[int, ...]) -> Tensor:
    """Return tables of shuffled blocks; entries behind a row's blocks are far outside the pool."""
    counts = [blocks_for(length) for length in lens]
    order = torch.split(torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5)), counts)
    rows = torch.full((len(lens), max(counts) + 1), np.iinfo(np.int32).max, dtype=torch.int32)
    for row, blocks in zip(rows, order, strict=True):
        row[: len(blocks)] = blocks
    return rows


def pools(lens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the pool of the CPU operators and that of the nodes for GPUs, full of NaN."""
    blocks = sum(map(blocks_for, lens))
    shape = (blocks, LAYERS, 2, HEADS, BLOCK_SIZE)
    return torch.full((*shape[:-1], BLOCK_SIZE * WIDTH), torch.nan), torch.full((*shape, WIDTH), torch.nan)


def same_layout(cache: Tensor) -> Tensor:
    """Return the pool of the CPU operators in the layout of the nodes for GPUs."""
    keys, values = cache.unbind(2)
    shape = keys.shape[:-1]
    keys = keys.reshape(*shape, WIDTH, BLOCK_SIZE).transpose(-1, -2)
    return torch.stack((keys, values.reshape(*shape, BLOCK_SIZE, WIDTH)), dim=2)


def test_every_node_has_a_reference() -> None:
    assert list(references.REFERENCES) == [node.name for node in nodes.NODES]


def test_sample_is_declared_with_all_parameters_of_a_sample() -> None:
    """The declarations import no NumPy, so they cannot read the lists."""
    axes = {given.name: given.axes for given in nodes.SAMPLE.inputs}
    assert axes["float_params"] == f"K, {len(FLOAT_PARAMS)}"
    assert axes["int_params"] == f"K, {len(INT_PARAMS)}"


@pytest.mark.parametrize("position_table", [None, normal(9, STATES, seed=1)])
def test_embed_equals_the_operator(position_table: Tensor | None) -> None:
    tokens, positions, weight = ints(3, 0, 6, 5), ints(0, 8, 2, 1), normal(7, STATES)
    expected = embed(tokens.long(), positions, weight, position_table, scale=4.0)
    found = references.embed(tokens, positions, weight, position_table, None, None, None, None, scale=4.0)
    assert_close(found, expected, **TOLERANCE)


def test_embed_reads_previous_tokens_and_types_and_ignores_padding() -> None:
    weight, types = normal(7, STATES), normal(2, STATES, seed=1)
    found = references.embed(
        ints(-1, 4, -1, 0), ints(3, 4, 0, PADDING), weight, None, ints(1, 1, 0, 0), ints(-1, 6),
        ints(0, 1, 1, 0), types, scale=1.0,
    )  # fmt: skip
    assert_close(found, weight[[6, 4, 0, 0]] + types[[0, 1, 1, 0]])


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("is_full", [True, False])
def test_add_norm_equals_the_operator(kind: str, is_full: bool) -> None:
    x, bias = normal(5, STATES), normal(STATES, seed=1)
    residual, weight, norm_bias = (normal(5, STATES, seed=2), normal(STATES, seed=3), bias) if is_full else [None] * 3
    expected = add_norm(x + bias, residual, weight, norm_bias, epsilon=1e-5, kind=kind)
    found = references.add_norm(x, bias, residual, weight, norm_bias, epsilon=1e-5, kind=kind)
    assert_close(found, tuple(expected), **TOLERANCE)


@pytest.mark.parametrize("activation", nodes.ACTIVATIONS)
def test_activate_equals_the_operator(activation: str) -> None:
    x, bias = normal(5, 12), normal(12, seed=1)
    plain = references.activate(x, bias, activation=activation, gated=False)
    assert_close(plain, ACTIVATIONS[activation](x + bias), **TOLERANCE)
    gated = references.activate(x, bias, activation=activation, gated=True)
    assert_close(gated, gate(x + bias, activation=activation), **TOLERANCE)


def test_rotary_equals_the_operator() -> None:
    qkv, bias, table, positions = normal(4, 3 * STATES), normal(3 * STATES, seed=1), normal(9, WIDTH), ints(0, 8, 2, 2)
    expected = eager_attention.rotary(qkv + bias, positions, table, num_heads=HEADS)
    assert_close(references.rotary(qkv, bias, positions, table, num_heads=HEADS), expected, **TOLERANCE)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", BIASES)
def test_packed_attention_equals_the_operator(kind: str, causal: bool) -> None:
    qkv, bias, offsets = normal(sum(LENS), 3 * STATES), normal(3 * STATES, seed=1), ramp(LENS)
    tiles = [(b, first) for b, length in enumerate(LENS) for first in range(0, length, TILE)]
    given = torch.tensor([*tiles, (-1, 0)], dtype=torch.int32)
    attributes: dict[str, Any] = dict(num_heads=HEADS, scale=0.3, causal=causal)
    expected = eager_attention.packed_attention(qkv + bias, offsets, *score_biases(kind), **attributes)
    found = references.packed_attention(qkv, bias, offsets, given, *score_biases(kind), **attributes)
    assert_close(found, expected, **TOLERANCE)


def test_paged_write_equals_the_operator() -> None:
    kv, bias, (before, cache) = normal(sum(LENS), 2 * STATES), normal(2 * STATES, seed=1), pools(LENS)
    _, expected = eager_attention.paged_write(
        kv + bias, before, tables(LENS), ramp(LENS), None, num_heads=HEADS, layer=1
    )
    rows = torch.repeat_interleave(torch.tensor(LENS))
    positions = torch.cat([torch.arange(length) for length in LENS])
    padding = torch.tensor([PADDING])
    written = references.paged_write(
        torch.cat((kv, kv[:1])), bias, cache, tables(LENS), torch.cat((rows, rows[:1])).int(),
        torch.cat((positions, padding)).int(), num_heads=HEADS, layer=1,
    )  # fmt: skip
    assert written.tolist() == [1]
    assert_close(cache, same_layout(expected), equal_nan=True)


@pytest.mark.parametrize("kind", BIASES)
def test_write_and_paged_attention_equal_self_attention(kind: str) -> None:
    lens = (3, 40)
    qkv, bias, (before, cache) = normal(sum(lens), 3 * STATES), normal(3 * STATES, seed=1), pools(lens)
    rows = torch.repeat_interleave(torch.tensor(lens)).int()
    positions = torch.cat([torch.arange(length) for length in lens]).int()
    attributes: dict[str, Any] = dict(num_heads=HEADS, layer=1)
    expected, after = eager_attention.paged_self_attention(
        qkv + bias, before, tables(lens), ramp(lens), positions, *score_biases(kind), scale=0.3, **attributes
    )
    written = references.paged_write(qkv, bias, cache, tables(lens), rows, positions, **attributes)
    found = references.paged_attention(
        qkv, bias, cache, tables(lens), rows, positions + 1, written, *score_biases(kind), scale=0.3, **attributes
    )  # fmt: skip
    assert_close(found, expected, **TOLERANCE)
    assert_close(cache, same_layout(after), equal_nan=True)


def test_paged_attention_equals_cross_attention_and_gives_padding_zeros() -> None:
    lens, counts = (3, 40), (2, 1)
    query, bias, (cache, _) = normal(sum(counts), STATES), normal(STATES, seed=1), pools(lens)
    _, cache = eager_attention.paged_write(
        normal(sum(lens), 2 * STATES), cache, tables(lens), ramp(lens), None, num_heads=HEADS, layer=0
    )
    attributes: dict[str, Any] = dict(num_heads=HEADS, layer=0, scale=0.3)
    expected = eager_attention.paged_cross_attention(
        query + bias, cache, tables(lens), ramp(counts), ints(*lens), **attributes
    )
    padded = torch.cat((query, query[:1]))
    found = references.paged_attention(
        padded, bias, same_layout(cache), tables(lens), ints(0, 0, 1, 0), ints(3, 3, 40, 0), None, None, None,
        **attributes,
    )  # fmt: skip
    assert_close(found, torch.cat((expected, torch.zeros(1, STATES))), **TOLERANCE)


def test_sample_equals_the_sampler_with_a_fixed_number_of_candidates() -> None:
    sampling = greedy_sampling(np.arange(3, dtype=np.int32))
    sampling.ints("num_logprobs")[:] = [-1, 2, 4]
    logits, bias, positions = normal(3, 30), normal(30, seed=1), ints(4, 5, 6)
    expected = sample_in_numpy((logits + bias).numpy(), sampling, positions.numpy())
    params = {field.name: torch.from_numpy(getattr(sampling, field.name)) for field in fields(sampling)}
    params.pop("picks")
    for count in (3, 6):
        token_ids, logprobs, *top = references.sample(
            logits, bias, positions, edit_rounds=ints(), candidates=ints(*[0] * count), **params
        )
        assert token_ids.tolist() == expected.token_ids.tolist()
        assert logprobs.tolist() == expected.logprobs.tolist()
        assert all(table.shape == (3, count) for table in top)
        assert top[0][2].tolist() == [*expected.top_ids[2, :count], *[-1] * (count - 4)]


@pytest.mark.parametrize("element", [torch.bfloat16, torch.float16])
def test_references_round_to_their_element_type(element: torch.dtype) -> None:
    x, bias = normal(4, STATES).to(element), normal(STATES, seed=1).to(element)
    normed, total = references.add_norm(x, bias, x, None, None, epsilon=1e-5, kind="layer")
    assert_close(total, (x.float() + bias.float() + x.float()).to(element), atol=0, rtol=0)
    assert normed.dtype == element
    assert references.activate(x, bias, activation="gelu", gated=True).dtype == element
