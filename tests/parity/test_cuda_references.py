"""Eager references of the nodes for GPUs: what they add to the eager functions of the operators, which they call.

test_cuda_lowering.py compares models that consist of them with the Transformer.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from antiphon.ops.cuda import PADDING, nodes, references
from antiphon.ops.sampling import FLOAT_PARAMS, INT_PARAMS, greedy_sampling
from antiphon.ops.sampling import sample as sample_in_numpy
from tests.operators import ints, normal

STATES = 32


def states(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(normal(*shape, seed=seed))


def numbers(*values: int) -> Tensor:
    return torch.from_numpy(ints(*values))


def test_every_node_has_a_reference() -> None:
    assert list(references.REFERENCES) == [node.name for node in nodes.NODES]


def test_sample_is_declared_with_all_parameters_of_a_sample() -> None:
    """The declarations import no NumPy, so they cannot read the lists."""
    axes = {given.name: given.axes for given in nodes.SAMPLE.inputs}
    assert axes["float_params"] == f"K, {len(FLOAT_PARAMS)}"
    assert axes["int_params"] == f"K, {len(INT_PARAMS)}"


def test_embed_reads_previous_tokens_and_types_and_ignores_padding() -> None:
    weight, types = states(7, STATES), states(2, STATES, seed=1)
    found = references.embed(
        numbers(-2, 4, -1, 0), numbers(3, 4, 0, PADDING), weight, None, numbers(-1, 6),
        numbers(0, 1, 1, 0), types, scale=1.0,
    )  # fmt: skip
    assert_close(found, weight[[6, 4, 0, 0]] + types[[0, 1, 1, 0]])


def test_sample_equals_the_sampler_with_a_fixed_number_of_candidates() -> None:
    sampling = greedy_sampling(np.arange(3, dtype=np.int32))
    sampling.ints("num_logprobs")[:] = [-1, 2, 4]
    logits, bias, positions = states(3, 30), states(30, seed=1), numbers(4, 5, 6)
    expected = sample_in_numpy((logits + bias).numpy(), sampling, positions.numpy())
    params = {field.name: torch.from_numpy(getattr(sampling, field.name)) for field in fields(sampling)}
    params.pop("picks")
    for count in (3, 6):
        token_ids, logprobs, *top = references.sample(
            logits, bias, positions, edit_rounds=numbers(), candidates=numbers(*[0] * count), **params
        )
        assert token_ids.tolist() == expected.token_ids.tolist()
        assert logprobs.tolist() == expected.logprobs.tolist()
        assert all(table.shape == (3, count) for table in top)
        assert top[0][2].tolist() == [*expected.top_ids[2, :count], *[-1] * (count - 4)]


@pytest.mark.parametrize("element", [torch.bfloat16, torch.float16])
def test_references_round_to_their_element_type(element: torch.dtype) -> None:
    x, bias = states(4, STATES).to(element), states(STATES, seed=1).to(element)
    normed, total = references.add_norm(x, bias, x, None, None, epsilon=1e-5, kind="layer")
    assert_close(total, (x.float() + bias.float() + x.float()).to(element), atol=0, rtol=0)
    assert normed.dtype == element
    assert references.activate(x, bias, activation="gelu", gated=True).dtype == element
