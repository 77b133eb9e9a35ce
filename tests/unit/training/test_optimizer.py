import pytest
import torch
from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
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
