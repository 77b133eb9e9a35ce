"""Loss of a decoder-only model on running text, per token for training and per character for reports."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from antiphon.text.tokenizer import Tokenizer
from antiphon.training.data.text_windows import WindowBatch, Windows, adjacent_starts
from antiphon.training.tasks.loss import linear_cross_entropy
from antiphon.training.tasks.text_loss import TextLoss, text_loss
from antiphon.transformer.transformer import Transformer

SCORED_TOKENS = 4096  # of the windows that are scored together; limits memory


class LanguageLoss(nn.Module):
    """Loss of the next token at every position of a batch of windows."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: WindowBatch, smoothing: float) -> Tensor:
        """Return the summed label-smoothed cross entropy of the labels, [1], in nats."""
        hidden = self.model.decode(batch.inputs, None).flatten(0, 1)
        output, labels = self.model.output, batch.labels.flatten()
        return linear_cross_entropy(hidden, output.weight, labels, smoothing=smoothing, bias=output.bias)[None]


@torch.no_grad()
def language_loss(model: Transformer, tokenizer: Tokenizer, ids: Sequence[int]) -> TextLoss:
    """Return the loss of a text of at least two tokens, in float32.

    The text is split into adjacent windows of the model's length. Every token except the first is predicted once, from
    the tokens before it in its window. The model must be in evaluation mode.
    """
    num_predicted = model.config.max_target_len - 1
    starts = adjacent_starts(len(ids), num_predicted)
    plan = torch.split(starts, max(1, SCORED_TOKENS // num_predicted))
    windows = Windows(tokens=torch.tensor(ids), plan=plan, num_predicted=num_predicted)
    device, loss = next(model.parameters()).device, LanguageLoss(model)
    nats = math.fsum(float(loss(windows[index].to(device), 0.0)) for index in range(len(windows)))
    return text_loss(nats, tokenizer.bytes_of(ids[1:]))
