"""Models with random weights, for measurements and tests. The seed makes runs reproducible."""

from __future__ import annotations

import torch

from antiphon.architecture.config import ModelConfig
from antiphon.transformer.transformer import Transformer


def random_transformer(config: ModelConfig, seed: int = 0) -> Transformer:
    """Return a model with random weights in evaluation mode; torch's global random state does not change.

    Biases and norms are random too, so that code that forgets one of them gives a different result.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Transformer(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return model
