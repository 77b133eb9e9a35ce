"""Importance of attention heads: gradient of the loss with respect to a gate on each head's output.

Michel et al. 2019, "Are Sixteen Heads Really Better than One?", section 4.1: for each head the mean over sentence pairs
of |d loss / d gate| with all gates at 1. It is a first-order estimate of the loss increase without the head. The model
does not change.

Axes: B batch, T positions, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from antiphon.training.data.translation_data import IGNORED_LABEL, Batch
from antiphon.transformer.layers import CrossAttention, SelfAttention
from antiphon.transformer.transformer import Transformer

Attention = SelfAttention | CrossAttention


def attentions(model: Transformer) -> dict[str, Attention]:
    """Return all attention modules by name, in the order of computation."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, SelfAttention | CrossAttention)
    }


@contextmanager
def head_gates(model: Transformer, gates: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiply each head's output by its gate inside the context.

    gates: for each attention module [H], or [B, H] with separate gates for each row.
    """
    with ExitStack() as hooks:
        for name, attention in attentions(model).items():
            if name in gates:
                handle = attention.out.register_forward_pre_hook(partial(_gated, gates[name]))
                hooks.callback(handle.remove)
        yield


def _gated(gate: Tensor, _: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Return the concatenated heads [B, T, H D] multiplied by their gates."""
    (heads,) = inputs
    per_head = heads.reshape(*heads.shape[:-1], gate.shape[-1], -1)  # [B, T, H, D]
    gate = gate if gate.ndim == 1 else gate[:, None]
    gated: Tensor = per_head * gate[..., None]
    return gated.flatten(-2)


def head_importance(model: Transformer, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """Return the importance [H] float32 of the heads of each attention module, over all rows of all batches.

    Raises ValueError without batches.
    """
    num_heads = {name: attention.heads[0] for name, attention in attentions(model).items()}
    totals = {name: torch.zeros(heads) for name, heads in num_heads.items()}
    num_rows = 0
    for batch in batches:
        rows = batch.source.shape[0]
        gates = {name: torch.ones(rows, heads, requires_grad=True) for name, heads in num_heads.items()}
        with head_gates(model, gates):
            total = sentence_losses(model, batch).sum()
        # A row's loss depends only on the row's gates, so one backward pass gives the gradients of all rows.
        gradients = torch.autograd.grad(total, list(gates.values()))
        for name, gradient in zip(gates, gradients, strict=True):
            totals[name] += gradient.abs().sum(dim=0)
        num_rows += rows
    if not num_rows:
        raise ValueError("importance needs at least one batch")
    return {name: total / num_rows for name, total in totals.items()}


@torch.no_grad()
def mean_loss(model: Transformer, batches: Iterable[Batch]) -> float:
    """Return the mean of sentence_losses over all rows of all batches, in nats a token."""
    return float(torch.cat([sentence_losses(model, batch) for batch in batches]).mean())


def sentence_losses(model: Transformer, batch: Batch) -> Tensor:
    """Return the cross entropy of each row, [B], in nats a token; the end token counts."""
    logits = model(batch.source, batch.inputs, batch.source_lens)  # [B, T, V]
    losses = functional.cross_entropy(
        logits.transpose(1, 2), batch.labels, ignore_index=IGNORED_LABEL, reduction="none"
    )
    return losses.sum(dim=1) / (batch.labels != IGNORED_LABEL).sum(dim=1)
