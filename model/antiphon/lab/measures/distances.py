"""Gradient against distance: how much the last output token depends on each source position.

In a recurrent model the path between two tokens grows with their distance. Attention connects them in one step
(Vaswani et al. 2017, section 4).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from antiphon.training.batches import IGNORED_LABEL
from antiphon.training.translation import Batch


def gradient_by_distance(loss: nn.Module, source_embedding: nn.Embedding, batch: Batch) -> list[float]:
    """Return the mean norm of d loss / d embedding by distance to the end of the source, nearest first.

    loss: BatchLoss or RecurrentLoss of a model in evaluation mode; source_embedding: the encoder's. The loss is that of
    the last target token before the end token, in nats for one example. The norm is that of the embedding's output,
    averaged over the batch. Distance 0 is the source's last word; its end token is left out.
    Raises ValueError if sources have different lengths, or no target has a token.
    """
    if len(lens := set(batch.source_lens.tolist())) != 1:
        raise ValueError(f"source_lens has the values {sorted(lens)}; all sources must have one length")
    last = _last_only(batch)
    embedded: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        """Keep the output; the encoder runs first, so the first one is the source also if embeddings are tied."""
        embedded.append(output)

    hook = source_embedding.register_forward_hook(keep)
    try:
        with torch.enable_grad():
            total = loss(last, 0.0).sum()
            (gradient,) = torch.autograd.grad(total, embedded[0])
    finally:
        hook.remove()
    norms = gradient[:, : lens.pop() - 1].norm(dim=2).mean(dim=0)
    found: list[float] = norms.flip(0).tolist()
    return found


def _last_only(batch: Batch) -> Batch:
    """Return the batch with one label a row: the last one before the end token."""
    num_labels = (batch.labels != IGNORED_LABEL).sum(dim=1)
    if int(num_labels.min()) < 2:
        raise ValueError("a target has no token before its end token; each needs at least one")
    positions = (num_labels - 2)[:, None]
    labels = torch.full_like(batch.labels, IGNORED_LABEL)
    labels.scatter_(1, positions, batch.labels.gather(1, positions))
    return Batch(source=batch.source, source_lens=batch.source_lens, inputs=batch.inputs, labels=labels)
