import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from antiphon.architecture.config import ModelConfig
from antiphon.training.batches import IGNORED_LABEL
from antiphon.training.losses import ROWS, linear_cross_entropy
from antiphon.training.optimizer import Optimizer
from antiphon.training.recipe import TrainConfig
from antiphon.transformer.transformer import Transformer

CONFIG = ModelConfig(vocab_size=40, d_model=32, encoder_layers=2, decoder_layers=1, num_heads=4, d_ff=64)


def updates(model: nn.Module, config: TrainConfig, learning_rate: float) -> dict[str, Tensor]:
    """Return what one step with random gradients adds to each parameter."""
    generator = torch.Generator().manual_seed(1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    Optimizer(model, config).step(learning_rate)
    assert all(parameter.grad is None for parameter in model.parameters())
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def is_nearly_orthogonal(update: Tensor) -> bool:
    """Five Newton-Schulz steps bring the singular values near to each other; those of random matrices lie far apart."""
    values = torch.linalg.svdvals(update)
    return bool(values.max() < 3 * values.min())


def test_muon_updates_the_matrices_of_the_layers_and_nothing_else() -> None:
    found = updates(Transformer(CONFIG), TrainConfig(optimizer="muon"), 0.01)
    matrices = {name for name, update in found.items() if update.dim() == 2}
    in_layers = {name for name in matrices if ".layers." in name}
    assert len(in_layers) == 2 * 4 + 7  # qkv, out, inner, outer; the decoder also q, kv and out of cross-attention
    assert {name for name in matrices if is_nearly_orthogonal(found[name])} == in_layers
    for name in in_layers:  # Liu et al. 2025: the root mean square of AdamW's updates, about 0.2 of the rate
        assert found[name].square().mean().sqrt() == pytest.approx(0.2 * 0.01, rel=0.25)


def test_other_parameters_have_the_updates_of_adamw() -> None:
    torch.manual_seed(2)
    model, config = Transformer(CONFIG), TrainConfig(optimizer="muon")
    reference = Transformer(CONFIG)
    reference.load_state_dict(model.state_dict())
    found, expected = (updates(one, each, 0.01) for one, each in ((model, config), (reference, TrainConfig())))
    for name, update in found.items():
        if ".layers." not in name or update.dim() < 2:
            assert torch.equal(update, expected[name]), name


def test_state_of_another_optimiser_continues_its_updates() -> None:
    models = [Transformer(CONFIG) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    config = TrainConfig(optimizer="muon")
    optimizers = [Optimizer(model, config) for model in models]
    for step in range(2):
        for model in models[: 1 if step == 0 else 2]:
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        if step == 1:
            models[1].load_state_dict(models[0].state_dict())
            optimizers[1].load({name: value.clone() for name, value in optimizers[0].state().items()})
        for optimizer in optimizers[: 1 if step == 0 else 2]:
            optimizer.step(0.01)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


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
        torch.autograd.grad(0.3 * ours, leaves), torch.autograd.grad(0.3 * theirs, leaves), rtol=1e-4, atol=1e-5
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
