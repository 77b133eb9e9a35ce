"""The native operators as PyTorch operators: schemas, shape rules, and unchanged inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from antiphon.export.bundle_model import sampling_inputs
from antiphon.ops.operator import torch_operator
from antiphon.ops.operators import OPERATORS
from antiphon.ops.operators.attention import disentangled_attention, paged_write, read_positions, write_position
from antiphon.ops.operators.linear import linear
from antiphon.ops.operators.rows import add_norm, embed
from antiphon.ops.operators.sample import SAMPLE, sample
from antiphon.ops.operators.sublayers import (
    feed_forward_sublayer,
    packed_attention_sublayer,
    paged_cross_attention_sublayer,
    paged_self_attention_sublayer,
)
from tests.batches import SampleSettings, sampling_of

HEADS, WIDTH = 2, 8
Call = tuple[Callable[..., Any], tuple[Tensor | None, ...], dict[str, Any]]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pool() -> Tensor:
    return torch.zeros(5, 2, 2, HEADS, 16 * 16)


TABLES = torch.tensor([[4, 1], [0, 2]], dtype=torch.int32)
STATES = (normal(3, 8), normal(3, 8) * 2)
PRODUCTS = (normal(48, 8), normal(48), normal(8, 16), None)
NORM = (normal(8), None)
CALLS: dict[str, Call] = {
    "embed": (embed, (torch.tensor([1, 3]), ints(0, 1), normal(6, 8), normal(4, 8)), dict(scale=2.0)),
    "linear": (linear, (normal(3, 8), normal(5, 8), normal(5)), dict(activation="gelu")),
    "add_norm": (add_norm, (normal(3, 8), None, normal(8), None), dict(epsilon=1e-5, kind="rms")),
    "disentangled_attention": (
        disentangled_attention,
        (normal(5, 48), ints(0, 2, 5), ints(0, 1, 1), normal(2, 16), normal(2, 16)),
        dict(num_heads=HEADS, scale=0.5),
    ),
    "feed_forward_sublayer": (
        feed_forward_sublayer,
        (*STATES, normal(20, 8), normal(20), normal(8, 10), None, *NORM),
        dict(activation="silu", gated=True, epsilon=1e-5, kind="layer"),
    ),
    "packed_attention_sublayer": (
        packed_attention_sublayer,
        (*STATES, *PRODUCTS, *NORM, ints(0, 1, 3), normal(HEADS, 3), None, ints(0, 0, 1), normal(2, WIDTH)),
        dict(num_heads=HEADS, scale=0.5, causal=False, epsilon=1e-5, kind="layer"),
    ),
    "paged_self_attention_sublayer": (
        paged_self_attention_sublayer,
        (*STATES, *PRODUCTS, *NORM, pool(), TABLES, ints(0, 2, 3), ints(15, 16, 0), None, None, normal(17, WIDTH)),
        dict(num_heads=HEADS, scale=0.5, layer=1, epsilon=1e-5, kind="rms"),
    ),
    "paged_cross_attention_sublayer": (
        paged_cross_attention_sublayer,
        (*STATES, normal(16, 8), None, normal(8, 16), None, *NORM, pool(), TABLES, ints(0, 2, 3), ints(20, 4)),
        dict(num_heads=HEADS, scale=0.5, layer=0, epsilon=1e-5, kind="layer"),
    ),
    "paged_write": (
        paged_write,
        (normal(6, 32), pool(), TABLES, ints(0, 5, 6), None),
        dict(num_heads=HEADS, layer=0),
    ),
}


def test_every_native_op_has_a_call() -> None:
    assert {operator.name for operator in OPERATORS} == {*CALLS, "sample"}


@pytest.mark.parametrize("name", CALLS)
def test_native_op_passes_pytorch_checks(name: str) -> None:
    op, operands, attributes = CALLS[name]
    torch.library.opcheck(op, operands, attributes, test_utils=("test_schema", "test_faketensor"))  # type: ignore[arg-type]


def test_sample_op_passes_pytorch_checks() -> None:
    """Its shape rule is left out: how many candidates come back is in the data."""
    settings = [
        SampleSettings(num_logprobs=2, edits=[(3, 0.5, 2.0, -1.0)]),
        SampleSettings(temperature=1.0, seed=7),
        SampleSettings(forced_id=9),
    ]
    held = sampling_inputs(sampling_of([1, 0, 1], settings))
    operands = (normal(3, 8), normal(20, 8), ints(0, 1, 4), *map(torch.from_numpy, held.values()), normal(20))
    torch.library.opcheck(torch_operator(SAMPLE), operands, test_utils="test_schema")
    token_ids, logprobs, *tops = sample(*operands)
    assert token_ids.shape == logprobs.shape == (3,)
    assert token_ids[2] == 9
    assert [top.shape for top in tops] == [(3, 2)] * 3


def test_pool_returns_the_written_values_and_changes_nothing_else() -> None:
    cache, table = torch.full((5, 2, 2, HEADS, 16 * 16), float("nan")), [3, 0]
    keys, values = normal(18, HEADS, WIDTH), normal(18, HEADS, WIDTH) * 2
    for position in range(18):
        write_position(cache, 1, table, position, keys[position], values[position])
    for found, expected in zip(read_positions(cache, 1, table, 18, (HEADS, WIDTH)), (keys, values), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert cache[:, 0].isnan().all()
    assert cache[[1, 2, 4]].isnan().all()
    assert int((~cache.isnan()).sum()) == 2 * keys.numel()
