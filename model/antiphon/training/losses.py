"""Losses of a batch: output projection and cross entropy in one function, and the sums of an encoder's heads.

If the [N, V] arrays of logits, probabilities and gradients are written to memory as a whole, they take most of a small
model's training step. Chunks of rows stay in the processor's cache, and only the gradient is kept.

An encoder's head is only computed for tokens with a label. In masked-language modelling 85 of 100 tokens have none, and
padding never has one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from antiphon.architecture.heads import FIRST_TOKEN_TASKS, Task
from antiphon.training.batches import IGNORED_LABEL, EncoderBatch
from antiphon.transformer.heads import Head
from antiphon.transformer.transformer import Transformer

# Rows of a chunk: 256 x 8,000 float32 logits are 8 MB. Measured on one core of an AMD EPYC (Zen 4), 2,048 labels, bf16,
# seconds of processor time: 0.19 (64 rows), 0.18 (128), 0.17 (256), 0.21 (512).
ROWS = 256
# On a GPU a chunk has this many rows: launches of kernels take longer than small chunks.
_GPU_ROWS = 16_384


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss whose forward pass also computes the gradient: it is always needed, and the chunk is still in the cache."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float
    ) -> Tensor:
        dtype = hidden.dtype
        narrow = weight.to(dtype)
        gradient = torch.empty(hidden.shape[0], weight.shape[0], dtype=dtype, device=hidden.device)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        size = _GPU_ROWS if hidden.is_cuda else ROWS
        for start in range(0, hidden.shape[0], size):
            rows = slice(start, start + size)
            # No name holds the logits, so that those of two chunks never take memory at the same time.
            loss, gradient[rows] = _chunk_loss(_logits(hidden[rows], narrow, bias), labels[rows], smoothing)
            total += loss
        ctx.save_for_backward(hidden, narrow, gradient)
        ctx.weight_dtype = weight.dtype
        return total.float()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        hidden, weight, gradient = ctx.saved_tensors
        scale = upstream[0].to(hidden.dtype)
        of_bias = gradient.sum(dim=0, dtype=ctx.weight_dtype) * upstream[0] if ctx.needs_input_grad[2] else None
        of_weight = (gradient.T @ (hidden * scale)).to(ctx.weight_dtype)
        return gradient @ (weight * scale), of_weight, of_bias, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = (hidden @ weight.T).float()
    if bias is not None:
        logits += bias
    return logits


def _chunk_loss(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the summed loss and its gradient [n, V] float32, which overwrites the logits [n, V]."""
    counted = labels != IGNORED_LABEL
    labels = labels.where(counted, 0)[:, None]
    loss = -(1 - smoothing) * logits.gather(1, labels)[:, 0]
    if smoothing:
        loss -= smoothing * logits.mean(dim=1)
    largest = logits.amax(dim=1)
    gradient = logits.sub_(largest[:, None]).exp_()
    total = gradient.sum(dim=1)
    loss += total.log() + largest
    gradient.mul_((counted / total)[:, None])
    if smoothing:
        gradient.sub_((counted * (smoothing / logits.shape[1]))[:, None])
    gradient.scatter_add_(1, labels, (counted * (smoothing - 1))[:, None])
    return (loss * counted).double().sum(), gradient


def padding_of(num_labels: int) -> int:
    """Return the rows to add, so that few different numbers of rows occur: whole chunks, or quarters of one chunk."""
    return -num_labels % (ROWS if num_labels > ROWS else ROWS // 4)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, smoothing: float, bias: Tensor | None = None
) -> Tensor:
    """Return the cross entropy between softmax(hidden weight^T + bias) and smoothed labels, summed over rows, in nats.

    hidden: [N, M] float; labels: [N] int64, IGNORED_LABEL for rows that do not count
    weight: [V, M] float32, converted to the dtype of hidden, or of autocast if it is on
    bias: [V] float32 or None
    smoothing: share of the target probability spread evenly over V (Szegedy et al. 2016, section 7).
    Returns a float32 scalar.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):  # autocast has no effect in the backward pass of a custom function
        hidden = hidden.to(torch.get_autocast_dtype(device))
    # Rows are padded, because oneDNN compiles a kernel for every new shape and the number of labels always differs.
    padding = padding_of(hidden.shape[0])
    hidden = functional.pad(hidden, (0, 0, 0, padding))
    labels = functional.pad(labels, (0, padding), value=IGNORED_LABEL)
    total: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, smoothing)  # type: ignore[no-untyped-call]
    return total


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
