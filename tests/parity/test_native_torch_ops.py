"""The native operators as PyTorch operators: schemas, shape rules, and unchanged inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from antiphon.export.bundle_model import sampling_inputs
from antiphon.ops.operator import Operator, torch_operator
from antiphon.ops.operators import OPERATORS
from antiphon.ops.operators.attention import read_positions, write_position
from antiphon.ops.operators.sample import SAMPLE, sample
from tests.batches import SampleSettings, sampling_of
from tests.operators import call, ints, normal, small_sizes


@pytest.mark.parametrize("operator", [each for each in OPERATORS if each is not SAMPLE], ids=lambda each: each.name)
def test_operator_passes_pytorch_checks(operator: Operator) -> None:
    arrays, attributes = call(operator, small_sizes(operator), np.random.default_rng(0))
    operands = tuple(torch.from_numpy(array) if array is not None else None for array in arrays.values())
    torch.library.opcheck(torch_operator(operator), operands, attributes, test_utils=("test_schema", "test_faketensor"))


def test_sample_passes_pytorch_checks() -> None:
    """Its shape rule is left out: how many candidates come back is in the data."""
    settings = [
        SampleSettings(num_logprobs=2, edits=[(3, 0.5, 2.0, -1.0)]),
        SampleSettings(temperature=1.0, seed=7),
        SampleSettings(forced_id=9),
    ]
    held = sampling_inputs(sampling_of([1, 0, 1], settings))
    arrays = (normal(3, 8), normal(20, 8), ints(0, 1, 4), *held.values(), normal(20))
    operands = tuple(map(torch.from_numpy, arrays))
    torch.library.opcheck(torch_operator(SAMPLE), operands, test_utils="test_schema")
    token_ids, logprobs, *tops = sample(*operands)
    assert token_ids.shape == logprobs.shape == (3,)
    assert token_ids[2] == 9
    assert [top.shape for top in tops] == [(3, 2)] * 3


def test_pool_returns_the_written_values_and_changes_nothing_else() -> None:
    cache, table = torch.full((5, 2, 2, 2, 16 * 16), float("nan")), [3, 0]
    keys, values = torch.from_numpy(normal(2, 18, 2, 8))
    for position in range(18):
        write_position(cache, 1, table, position, keys[position], values[position])
    for found, expected in zip(read_positions(cache, 1, table, 18, (2, 8)), (keys, values), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert cache[:, 0].isnan().all()
    assert cache[[1, 2, 4]].isnan().all()
    assert int((~cache.isnan()).sum()) == 2 * keys.numel()
