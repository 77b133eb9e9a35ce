import pytest
import torch

from antiphon.transformer.dropout import Dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_share_scale_and_gradient(p: float, dtype: torch.dtype) -> None:
    dropout = Dropout(p)
    x = torch.ones(400, 257, dtype=dtype, requires_grad=True)
    torch.manual_seed(3)
    y = dropout(x)
    rounded = round(256 * p) / 256
    is_dropped = y == 0
    assert is_dropped.double().mean() == pytest.approx(rounded, abs=5 * (p * (1 - p) / x.numel()) ** 0.5)
    assert abs(rounded - p) <= 1 / 512
    torch.testing.assert_close(
        y[~is_dropped].float(), torch.full([int((~is_dropped).sum())], 1 / (1 - rounded)), rtol=4e-3, atol=0
    )
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y)  # the gradient has the same elements and the same scale


def test_elements_are_independent() -> None:
    torch.manual_seed(4)
    dropped = (Dropout(0.25)(torch.ones(20_000, 16)) == 0).double()
    correlations = torch.corrcoef(dropped.T) - torch.eye(16)
    assert correlations.abs().max() < 5 / 20_000**0.5


def test_seed_decides_the_elements() -> None:
    x = torch.ones(30, 30)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(Dropout(0.3)(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_nothing_changes_outside_training() -> None:
    x = torch.ones(5, 5)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
