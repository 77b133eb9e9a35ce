"""Loss of a student encoder beside its teacher, on masked tokens (Sanh et al. 2019, DistilBERT, section 2).

Sanh et al. compare both distributions at every token; here, as for the labels, only masked tokens are compared.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from antiphon.training.data.encoder_data import EncoderBatch
from antiphon.training.data.translation_data import IGNORED_LABEL
from antiphon.training.recipe import Distillation
from antiphon.training.tasks.encoder_loss import labelled_states
from antiphon.transformer.heads import Head
from antiphon.transformer.transformer import Transformer


class DistillationLoss(nn.Module):
    """Weighted sum of three losses in training mode; only the cross entropy of masked tokens in evaluation mode.

    The teacher is not trained, and is always in evaluation mode.
    """

    def __init__(self, student: Transformer, teacher: Transformer, config: Distillation) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher.requires_grad_(False).eval()
        self.config = config

    def train(self, mode: bool = True) -> Self:  # noqa: FBT001, FBT002
        """Set the mode of the student as nn.Module.train does."""
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, batch: EncoderBatch, smoothing: float) -> Tensor:
        """Return the loss summed over the masked tokens, [1] float32, in nats; the cosine loss counts as its mean."""
        states = self.student.encode(batch.ids, batch.lens, batch.type_ids)
        logits, labels = _fill_mask(self.student, states, batch)
        cross_entropy = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        if not self.training:
            return cross_entropy[None]
        with torch.no_grad():
            expected = self.teacher.encode(batch.ids, batch.lens, batch.type_ids)
            taught, _ = _fill_mask(self.teacher, expected, batch)
        distance = _cosine_distance(states, expected, batch.lens) * len(labels)
        config = self.config
        soft = _soft_cross_entropy(logits, taught, config.temperature)
        return (config.soft * soft + config.labels * cross_entropy + config.cosine * distance)[None]


def _fill_mask(model: Transformer, states: Tensor, batch: EncoderBatch) -> tuple[Tensor, Tensor]:
    """Return the logits [K, V] float32 and labels [K] of the masked tokens; states [B, S, M]."""
    head = model.heads["fill_mask"]
    assert isinstance(head, Head)
    hidden, labels = labelled_states(states, batch.labels["fill_mask"])
    is_labelled = labels != IGNORED_LABEL
    return head(hidden).float()[is_labelled], labels[is_labelled]


def _soft_cross_entropy(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """Return the divergence of the student's distribution from the teacher's, summed over rows, times temperature^2.

    The factor keeps the size of the gradient (Hinton et al. 2015, section 2.1).
    """
    found = functional.log_softmax(logits / temperature, dim=-1)
    wanted = functional.log_softmax(taught / temperature, dim=-1)
    return functional.kl_div(found, wanted, reduction="sum", log_target=True) * temperature**2


def _cosine_distance(states: Tensor, expected: Tensor, lens: Tensor) -> Tensor:
    """Return the mean of 1 - cos over all tokens that are not padding; states, expected [B, S, M], lens [B]."""
    is_token = torch.arange(states.shape[1], device=states.device) < lens[:, None]
    similarity = functional.cosine_similarity(states.float(), expected.float(), dim=-1)
    return (1 - similarity)[is_token].mean()
