"""Optimisers of a training run: AdamW for every parameter, or Muon for the matrices of the layers and AdamW for others.

Muon (Jordan et al. 2024) makes the update of a matrix nearly orthogonal, so that rare directions learn as fast as
frequent ones. Its rate is scaled as Liu et al. 2025, section 2.2, propose, so that both optimisers share one rate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from antiphon.training.recipe import TrainConfig

Named = list[tuple[str, nn.Parameter]]


class Optimizer:
    """Updates the trainable parameters of a model. Weight decay applies to matrices, not to biases and norms."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        learning = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        matrices = _matrices_of_layers(model, learning) if config.optimizer == "muon" else Named()
        chosen = {name for name, _ in matrices}
        remaining = [(name, parameter) for name, parameter in learning if name not in chosen]
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in learning}
        self._parts: list[torch.optim.Optimizer] = [_adamw(remaining, config)]
        if matrices:
            self._parts.append(_muon(matrices, config))

    def step(self, learning_rate: float) -> None:
        """Update the parameters from their gradients, and drop the gradients."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = learning_rate
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return the state by `parameter/quantity`; parameters that never had a gradient have none."""
        return {
            f"{self._names[parameter]}/{quantity}": value
            for part in self._parts
            for parameter, quantities in part.state.items()
            for quantity, value in quantities.items()
        }

    def load(self, saved: dict[str, Tensor]) -> None:
        """Continue from the state of an optimiser of the same model and settings."""
        quantities: dict[str, dict[str, Tensor]] = {}
        for name, value in saved.items():
            parameter, _, quantity = name.rpartition("/")
            quantities.setdefault(parameter, {})[quantity] = value
        for part in self._parts:
            described = part.state_dict()
            names = [self._names[parameter] for group in part.param_groups for parameter in group["params"]]
            described["state"] = {index: quantities[name] for index, name in enumerate(names) if name in quantities}
            part.load_state_dict(described)


def _matrices_of_layers(model: nn.Module, learning: Named) -> Named:
    """Return the weights of linear maps in the layers of a stack, without embeddings, outputs and heads."""
    linear = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    return [(name, parameter) for name, parameter in learning if ".layers." in name and parameter in linear]


def _adamw(named: Named, config: TrainConfig) -> torch.optim.Optimizer:
    groups = [
        {"params": [parameter for _, parameter in named if parameter.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [parameter for _, parameter in named if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, config.adam_beta2), eps=config.adam_epsilon, fused=True)


def _muon(named: Named, config: TrainConfig) -> torch.optim.Optimizer:
    matrices = [parameter for _, parameter in named]
    return torch.optim.Muon(matrices, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
