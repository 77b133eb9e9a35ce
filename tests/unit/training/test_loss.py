import pytest
import torch
from torch.nn import functional

from antiphon.training.batches import IGNORED_LABEL
from antiphon.training.losses import ROWS, linear_cross_entropy


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("rows", [3, ROWS, ROWS + 3])
@pytest.mark.parametrize("has_bias", [False, True])
def test_loss_and_gradients_equal_those_of_pytorch(smoothing: float, rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 24, generator=generator, requires_grad=True)
    weight = torch.randn(70, 24, generator=generator, requires_grad=True)
    bias = torch.randn(70, generator=generator, requires_grad=True) if has_bias else None
    labels = torch.randint(0, 70, (rows,), generator=generator)
    labels[1] = IGNORED_LABEL
    ours = linear_cross_entropy(hidden, weight, labels, smoothing=smoothing, bias=bias)
    logits = functional.linear(hidden, weight, bias)
    theirs = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
    leaves = (hidden, weight) if bias is None else (hidden, weight, bias)
    # The upstream factor is not 1, because the gradient is computed in the forward pass and must still be scaled.
    torch.testing.assert_close(
        torch.autograd.grad(0.3 * ours, leaves),
        torch.autograd.grad(0.3 * theirs, leaves),
        rtol=1e-4,
        atol=1e-5,
    )


def test_autocast_applies_to_the_matrix_products() -> None:
    """The gradient in bfloat16 is less exact than in float32, but has the same direction."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 24, generator=generator, requires_grad=True)
    weight = torch.randn(70, 24, generator=generator, requires_grad=True)
    labels = torch.randint(0, 70, (50,), generator=generator)
    exact = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, smoothing=0.1), weight)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, smoothing=0.1)
    narrow = torch.autograd.grad(loss, weight)[0]
    assert narrow.dtype == torch.float32
    assert not torch.equal(narrow, exact)
    assert functional.cosine_similarity(narrow.flatten(), exact.flatten(), dim=0) > 0.999
