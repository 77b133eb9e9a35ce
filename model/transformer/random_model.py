"""Random models: what is measured and tested where no trained weights are wanted. Seeded, so that two runs agree."""

from __future__ import annotations

import torch

from antiphon.model.config import ModelConfig
from antiphon.model.transformer.transformer import Transformer


def random_transformer(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model of random weights, vectors included (a forgotten bias or norm must show); leaves torch's state alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model
