"""Activation functions by the names that ModelConfig, heads and operators use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "tanh": torch.tanh,
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),  # Hendrycks and Gimpel 2016, section 2
}
