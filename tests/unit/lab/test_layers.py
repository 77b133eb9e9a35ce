"""Operations, chains and paths of single layers, against formulas and known graphs."""

from __future__ import annotations

import pytest
import torch

from antiphon.lab import costs
from antiphon.lab.costs import longest_chain, shortest_path

torch.set_num_threads(1)


def test_chain_and_path_of_a_known_graph() -> None:
    first, second = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    output = first
    for _ in range(5):
        output = output.exp()
    output = (output * second).sum()
    # AccumulateGrad of `first`, five exponentials, the product, the sum.
    assert longest_chain(output) == 8
    assert shortest_path(output, first) == 7
    assert shortest_path(output, second) == 2
    with pytest.raises(ValueError, match="does not depend"):
        shortest_path(output, torch.ones(1, requires_grad=True))


@pytest.mark.parametrize("length", [8, 40])
def test_operations_are_those_of_the_formulas(length: int) -> None:
    width = costs.WIDTH
    projections = 2 * length * width * 4 * width  # queries, keys, values and output
    products = 2 * 2 * length**2 * width  # scores, and their sum of values
    assert costs.num_operations("attention, eager", length) == projections + products
    assert costs.num_operations("attention, sdpa", length) == projections + products
    assert costs.num_operations("LSTM", length) == 2 * length * 2 * width * 4 * width


def test_chain_of_the_lstm_grows_with_each_step_and_that_of_attention_does_not() -> None:
    attention = [costs.operation_paths("attention, eager", length) for length in (8, 16, 32)]
    assert len(set(attention)) == 1
    recurrent = [costs.operation_paths("LSTM", length) for length in (8, 16, 32)]
    for one in (0, 1):
        first, second, third = (paths[one] for paths in recurrent)
        assert third - second == 2 * (second - first) > 0


def test_costs_have_every_figure_of_every_layer() -> None:
    found = costs.layer_costs(8, num_runs=1)
    assert found.keys() == {f"{name}, {unit}" for name in costs.LAYERS for unit in ("Mflop", "MB", "ms")}
    assert all(value > 0 for value in found.values())


def test_memory_of_eager_attention_has_the_score_matrices_and_that_of_the_lstm_grows_with_tokens() -> None:
    shorter, longer, heads = 256, 512, 4
    more = 4 * heads * (longer**2 - shorter**2)
    eager, sdpa, recurrent = (
        [costs.allocated_peak(costs.step_of(make(), length)) for length in (shorter, longer, 2 * longer)]
        for make in costs.LAYERS.values()
    )
    assert eager[1] - eager[0] > 2 * more
    assert sdpa[1] - sdpa[0] < more
    assert recurrent[2] - recurrent[1] == pytest.approx(2 * (recurrent[1] - recurrent[0]), rel=0.05)
