"""Transformer and LSTM behind one interface, for measures that treat both alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from antiphon.checkpoints.checkpoint import load_checkpoint
from antiphon.lab.recurrent.greedy import recurrent_greedy
from antiphon.lab.recurrent.lstm import RecurrentModel
from antiphon.lab.recurrent.recurrent_task import RecurrentLoss, load_recurrent
from antiphon.text.tokenizer import Tokenizer
from antiphon.training.corpus import Pair
from antiphon.training.translation import Batch, BatchLoss, Example, collate
from antiphon.transformer.greedy import greedy
from antiphon.transformer.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceModel:
    """An encoder-decoder in evaluation mode with its tokenizer."""

    model: Transformer | RecurrentModel
    tokenizer: Tokenizer

    @property
    def loss(self) -> nn.Module:
        """Loss of the next token: maps (batch, smoothing) to [1], the sum in nats."""
        return BatchLoss(self.model) if isinstance(self.model, Transformer) else RecurrentLoss(self.model)

    @property
    def source_embedding(self) -> nn.Embedding:
        """Embedding of the encoder."""
        assert self.model.encoder is not None
        return self.model.encoder.embedding

    def untrained(self, seed: int) -> SequenceModel:
        """Return the model with the weights at the start of a training run of this seed, see Trainer.

        torch's global random state does not change.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if isinstance(self.model, Transformer):
                model: Transformer | RecurrentModel = Transformer(self.model.config)
            else:
                model = RecurrentModel(self.model.config)
        return SequenceModel(model=model.eval(), tokenizer=self.tokenizer)

    def batch(self, pairs: Sequence[Pair]) -> Batch:
        """Return all pairs of texts as one batch."""
        tokenizer = self.tokenizer
        examples = [
            Example(source=[*tokenizer.encode(source), tokenizer.eos_id], target=tokenizer.encode(target))
            for source, target in pairs
        ]
        return collate(examples, tokenizer)

    def decode(self, sources: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Decode sources greedily as one batch, see `greedy`."""
        if isinstance(self.model, Transformer):
            return greedy(self.model, sources, max_new_tokens)
        return recurrent_greedy(self.model, sources, max_new_tokens)


def load_sequence_model(path: Path, kind: str) -> SequenceModel:
    """Read a checkpoint directory that Trainer wrote. kind: a name of OPEN_TASKS, transformer or lstm.

    Raises CheckpointError or TokenizerError naming the file.
    """
    found = load_recurrent(path) if kind == "lstm" else load_checkpoint(path)
    return SequenceModel(model=found.model, tokenizer=found.tokenizer)
