"""Loss of an encoder's heads on a batch: one sum of cross entropy for each head.

A head is only computed for tokens with a label. In masked-language modelling 85 of 100 tokens have none, and padding
never has one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from antiphon.architecture.heads import FIRST_TOKEN_TASKS, Task
from antiphon.training.data.encoder_data import EncoderBatch
from antiphon.training.data.translation_data import IGNORED_LABEL
from antiphon.training.tasks.loss import linear_cross_entropy, padding_of
from antiphon.transformer.heads import Head
from antiphon.transformer.transformer import Transformer


class EncoderLoss(nn.Module):
    """Losses of all heads. With freeze_encoder only the heads are trained, on states without dropout."""

    def __init__(self, model: Transformer, *, freeze_encoder: bool = False) -> None:
        super().__init__()
        self.model = model
        self.freeze_encoder = freeze_encoder
        if freeze_encoder:
            model.requires_grad_(False)
            model.heads.requires_grad_(True)

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Set the mode as nn.Module.train does; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.freeze_encoder and self.model.encoder is not None:
            self.model.encoder.eval()
        return self

    def forward(self, batch: EncoderBatch, smoothing: float) -> Tensor:
        """Return the summed label-smoothed cross entropy of each task in batch.labels, [K] float32, in nats."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_encoder):
            memory = self.model.encode(batch.ids, batch.lens, batch.type_ids)
        return torch.stack([self._loss(task, memory, labels, smoothing) for task, labels in batch.labels.items()])

    def _loss(self, task: Task, memory: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        head = self.model.heads[task]
        assert isinstance(head, Head)
        assert head.output is not None
        if task in FIRST_TOKEN_TASKS:
            outputs = head(memory[:, 0]).float()
        elif task == "tag":
            outputs, labels = head(memory).flatten(0, 1).float(), labels.flatten()
        else:
            hidden, labels = labelled_states(memory, labels)
            weight, bias = head.output.weight, head.output.bias
            return linear_cross_entropy(head.transformed(hidden), weight, labels, smoothing=smoothing, bias=bias)
        loss: Tensor = functional.cross_entropy(
            outputs, labels, ignore_index=IGNORED_LABEL, reduction="sum", label_smoothing=smoothing
        )
        return loss


def labelled_states(memory: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return states [K, M] and labels [K] of tokens with a label, of memory [B, S, M] and labels [B, S].

    K is rounded up, because oneDNN compiles a kernel for every new K; the added rows have no label.
    """
    is_labelled = labels != IGNORED_LABEL
    hidden, labels = memory[is_labelled], labels[is_labelled]
    padding = padding_of(len(labels))
    return functional.pad(hidden, (0, 0, 0, padding)), functional.pad(labels, (0, padding), value=IGNORED_LABEL)


@torch.no_grad()
def label_accuracy(model: Transformer, batches: Iterable[EncoderBatch]) -> dict[str, float]:
    """Return the accuracy of each task as `TASK_accuracy`, from 0 to 1; the model must be in evaluation mode."""
    right: dict[str, int] = {}
    total: dict[str, int] = {}
    device = next(model.parameters()).device
    for batch in (batch.to(device) for batch in batches):
        memory = model.encode(batch.ids, batch.lens, batch.type_ids)
        for task, labels in batch.labels.items():
            is_labelled = labels != IGNORED_LABEL
            states = memory[:, 0] if task in FIRST_TOKEN_TASKS else memory
            states, expected = states[is_labelled], labels[is_labelled]
            right[task] = right.get(task, 0) + int((model.read_out(task, states).argmax(dim=-1) == expected).sum())
            total[task] = total.get(task, 0) + len(expected)
    return {f"{task}_accuracy": right[task] / total[task] for task in right if total[task]}
