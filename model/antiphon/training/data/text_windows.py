"""Windows of a text's tokens as tensors, for language models.

A window has one token more than the model predicts in it: the first token is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.training.data.translation_data import IGNORED_LABEL


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowBatch:
    """Windows of running text: inputs and labels [B, T] int64; a label is the token after its input.

    Labels beyond the end of the text are IGNORED_LABEL.
    """

    inputs: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> WindowBatch:
        """Return the batch on a device."""
        return WindowBatch(inputs=self.inputs.to(device), labels=self.labels.to(device))

    @property
    def counts(self) -> Tensor:
        """Number of labels, [1] float64."""
        return (self.labels != IGNORED_LABEL).sum()[None].double()


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Planned batches of one pass through a text.

    tokens: [N] int64. plan: first token of each window, by batch. num_predicted: labels T of a window.
    """

    tokens: Tensor
    plan: Sequence[Tensor]
    num_predicted: int

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> WindowBatch:
        places = self.plan[index][:, None] + torch.arange(self.num_predicted + 1)  # [B, T + 1]
        last = len(self.tokens) - 1
        window = self.tokens[places.clamp(max=last)]
        return WindowBatch(inputs=window[:, :-1], labels=window[:, 1:].masked_fill(places[:, 1:] > last, IGNORED_LABEL))


def shuffled_starts(num_tokens: int, num_predicted: int, seed: int) -> Tensor:
    """Return the first tokens of adjacent windows from a random token on, in random order; the seed decides both.

    The number of windows depends only on the lengths. It is 0 for a text shorter than two windows.
    """
    chance = torch.Generator().manual_seed(seed)
    offset = torch.randint(num_predicted, (), generator=chance)
    count = max(0, (num_tokens - num_predicted) // num_predicted)
    return offset + num_predicted * torch.randperm(count, generator=chance)


def adjacent_starts(num_tokens: int, num_predicted: int) -> Tensor:
    """Return the first tokens of adjacent windows that predict every token of a text but the first."""
    return torch.arange(0, num_tokens - 1, num_predicted)
