"""Change of one weight by LoRA (Hu et al. 2022, section 4.1) or DoRA (Liu et al. 2024, equation 5), in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.errors import SourceError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LowRankChange:
    """Function from the weight of a module to its merged weight.

    The weight is [O, I]: outputs, inputs; with input_first=True it is [I, O]. An embedding has its tokens as inputs.

    down: [R, I] float32, lora_A
    up: [O, R] float32, lora_B
    scaling: factor of the product
    magnitude: [O] float32, norms of the rows of the merged weight; None: LoRA without magnitudes
    """

    module: str
    down: Tensor
    up: Tensor
    scaling: float
    magnitude: Tensor | None = None
    input_first: bool = False

    def __call__(self, weight: Tensor) -> Tensor:
        """Return the merged weight, float32, in the order of the given one. Raises SourceError for another shape."""
        base = weight.T if self.input_first and weight.ndim == 2 else weight
        expected = [len(self.up), self.down.shape[1]]
        if list(base.shape) != expected:
            raise SourceError(
                f"the adapter's product for {self.module} is {expected}, and the checkpoint's weight {list(base.shape)}"
            )
        if weight.is_meta:
            return weight
        merged = base + self.scaling * (self.up @ self.down)
        if self.magnitude is not None:
            merged *= (self.magnitude / torch.linalg.norm(merged, dim=1))[:, None]
        return merged.T if self.input_first else merged


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BiasChange:
    """Function from the bias [O] of a module to the bias with the scaled bias of lora_B [O]."""

    module: str
    added: Tensor

    def __call__(self, bias: Tensor) -> Tensor:
        """Return the merged bias, float32. Raises SourceError for another shape."""
        if bias.shape != self.added.shape:
            raise SourceError(
                f"the adapter's bias for {self.module} is {list(self.added.shape)}, "
                f"and the checkpoint's {list(bias.shape)}"
            )
        return bias if bias.is_meta else bias + self.added
