"""How much each attention head matters: the loss's gradient with respect to a gate on what the head puts out.

Michel et al. 2019, "Are Sixteen Heads Really Better than One?", section 4.1: for each head the mean over sentence pairs
of |d loss / d gate| with all gates at 1, a first-order estimate of what closing the gate would cost. Changes no model.

Axes: B batch, T positions, H heads, D head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from antiphon.model.training.data import IGNORED_LABEL, Batch
from antiphon.model.transformer.layers import CrossAttention, SelfAttention
from antiphon.model.transformer.transformer import Transformer

Attention = SelfAttention | CrossAttention


def attentions(model: Transformer) -> dict[str, Attention]:
    """Every attention module by its name, in the order of the computation."""
    return {
        name: module for name, module in model.named_modules() if isinstance(module, SelfAttention | CrossAttention)
    }


@contextmanager
def head_gates(model: Transformer, gates: Mapping[str, Tensor]) -> Iterator[None]:
    """Multiply each head's output by its gate: [H], or [B, H] for each row its own, by attention module."""
    with ExitStack() as hooks:
        for name, attention in attentions(model).items():
            if name in gates:
                handle = attention.out.register_forward_pre_hook(partial(_gated, gates[name]))
                hooks.callback(handle.remove)
        yield


def _gated(gate: Tensor, _: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    """Heads side by side [B, T, H D] times their gates."""
    (heads,) = inputs
    per_head = heads.reshape(*heads.shape[:-1], gate.shape[-1], -1)  # [B, T, H, D]
    gate = gate if gate.ndim == 1 else gate[:, None]
    gated: Tensor = per_head * gate[..., None]
    return gated.flatten(-2)


def head_importance(model: Transformer, batches: Iterable[Batch]) -> dict[str, Tensor]:
    """Importance [H] float32 of the heads of each attention module, over all rows of all batches."""
    names = list(attentions(model))
    totals = torch.zeros(len(names), model.config.num_heads)
    num_rows = 0
    for batch in batches:
        rows = batch.source.shape[0]
        gates = [torch.ones(rows, model.config.num_heads, requires_grad=True) for _ in names]
        with head_gates(model, dict(zip(names, gates, strict=True))):
            total = sentence_losses(model, batch).sum()
        # A row's loss depends on its own gates only, so one backward pass gives the gradient of each row's.
        gradients = torch.autograd.grad(total, gates)
        totals += torch.stack([gradient.abs().sum(dim=0) for gradient in gradients])
        num_rows += rows
    if not num_rows:
        raise ValueError("no batch to measure importance on")
    return dict(zip(names, totals / num_rows, strict=True))


@torch.no_grad()
def mean_loss(model: Transformer, batches: Iterable[Batch]) -> float:
    """The mean over all rows of all batches of their losses, nats a token."""
    return float(torch.cat([sentence_losses(model, batch) for batch in batches]).mean())


def sentence_losses(model: Transformer, batch: Batch) -> Tensor:
    """Cross entropy of each row, nats a token, end token included: [B]."""
    logits = model(batch.source, batch.inputs, batch.source_lens)  # [B, T, V]
    losses = functional.cross_entropy(
        logits.transpose(1, 2), batch.labels, ignore_index=IGNORED_LABEL, reduction="none"
    )
    return losses.sum(dim=1) / (batch.labels != IGNORED_LABEL).sum(dim=1)
