"""Training steps of whole models by length: time and memory of a Transformer and of the LSTM with additive attention.

The models have the shapes of sequence_recipes.py. One row has a source and a target of T random tokens each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from antiphon.architecture.config import ModelConfig
from antiphon.lab.data.algorithms import VOCAB_SIZE
from antiphon.lab.memory.measurement import allocated_peak
from antiphon.lab.recurrent.config import RecurrentConfig
from antiphon.lab.recurrent.lstm import RecurrentModel
from antiphon.lab.recurrent.recurrent_task import RecurrentLoss
from antiphon.lab.recurrent.sequence_recipes import LSTM, TRANSFORMER
from antiphon.lab.times import median_seconds
from antiphon.ops.attention import Backend
from antiphon.training.optimizer import Optimizer
from antiphon.training.recipe import TrainConfig
from antiphon.training.translation import Batch, BatchLoss
from antiphon.transformer.transformer import Transformer

_LEARNING_RATE = 1e-3


class WeightUpdate:
    """Updates of a model's weights on one batch, again and again. loss: BatchLoss or RecurrentLoss."""

    def __init__(self, loss: nn.Module, batch: Batch) -> None:
        self.loss = loss
        self.batch = batch
        self.optimizer = Optimizer(loss, TrainConfig())

    def run(self) -> None:
        """Update the weights once."""
        self.loss(self.batch, 0.0).sum().backward()
        self.optimizer.step(_LEARNING_RATE)


def transformer_loss(backend: Backend, length: int) -> BatchLoss:
    """Return the loss of a Transformer with random weights for texts of up to `length` tokens."""
    given = dict(vocab_size=VOCAB_SIZE, max_source_len=length, max_target_len=length)
    return BatchLoss(Transformer(ModelConfig.model_validate(TRANSFORMER | given), attention_backend=backend))


def recurrent_loss(length: int) -> RecurrentLoss:
    """Return the loss of an LSTM with random weights for texts of up to `length` tokens."""
    given = dict(vocab_size=VOCAB_SIZE, max_source_len=length, max_target_len=length)
    return RecurrentLoss(RecurrentModel(RecurrentConfig.model_validate(LSTM | given)))


LOSSES: Mapping[str, Callable[[int], nn.Module]] = {
    "Transformer, eager": partial(transformer_loss, "eager"),
    "Transformer, sdpa": partial(transformer_loss, "sdpa"),
    "LSTM": recurrent_loss,
}


def random_batch(length: int) -> Batch:
    """Return one row of random tokens, source and target of `length` tokens, all of them labelled."""
    source, inputs, labels = torch.randint(4, VOCAB_SIZE, (3, 1, length))
    return Batch(source=source, source_lens=torch.tensor([length], dtype=torch.int32), inputs=inputs, labels=labels)


def peak_bytes(step: WeightUpdate) -> int:
    """Return the peak of allocated bytes of one step, beside weights and optimiser state."""
    step.run()  # makes the optimiser state
    return allocated_peak(step.run)


def costs(length: int, num_runs: int) -> dict[str, float]:
    """Return MB and the median of ms of a step of every model, named "MODEL, UNIT"."""
    batch = random_batch(length)
    steps = {name: WeightUpdate(make(length), batch) for name, make in LOSSES.items()}
    found = {f"{name}, MB": peak_bytes(step) / 1e6 for name, step in steps.items()}
    times = median_seconds({name: step.run for name, step in steps.items()}, num_runs)
    return found | {f"{name}, ms": 1e3 * seconds for name, seconds in times.items()}
