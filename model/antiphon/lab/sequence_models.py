"""Sequence models, a Transformer and an LSTM of similar size: recipes, trained models, and costs of their steps.

Both train on the same batches, for SCAN and the algorithmic tasks. Settings are for one processor core: no label
smoothing and no early stopping (Csordas et al. 2021 show that such choices decide the result on SCAN), and small
batches, which give more updates in the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.checkpoints.checkpoint import load_checkpoint
from antiphon.lab.accuracy import examples_of
from antiphon.lab.costs import allocated_peak, median_seconds
from antiphon.lab.datasets import ALGORITHM_VOCAB_SIZE, Dataset
from antiphon.lab.recurrent import (
    OpenRecurrent,
    RecurrentConfig,
    RecurrentLoss,
    RecurrentModel,
    load_recurrent,
    recurrent_greedy,
)
from antiphon.ops.attention import Backend
from antiphon.text.tokenizer import Tokenizer
from antiphon.training.batches import IGNORED_LABEL
from antiphon.training.corpus import Pair
from antiphon.training.optimizer import Optimizer
from antiphon.training.recipe import Recipe, TrainConfig
from antiphon.training.task import RunFolders, TrainingTask
from antiphon.training.trainer import open_task
from antiphon.training.translation import Batch, BatchLoss, collate
from antiphon.transformer.greedy import greedy
from antiphon.transformer.transformer import Transformer

TRANSFORMER: dict[str, object] = dict(
    d_model=96, encoder_layers=2, decoder_layers=2, num_heads=4, d_ff=256, norm_placement="pre", dropout=0.0
)
"""Fields of ModelConfig: 0.46 million parameters for SCAN."""

LSTM: dict[str, object] = dict(d_model=128, encoder_layers=1, decoder_layers=1, dropout=0.0)
"""Fields of RecurrentConfig: 0.52 million parameters for SCAN."""

SCAN_LENS = (16, 56)
"""Maximum lengths of SCAN: commands have up to 9 words, and outputs up to 48 actions."""


PEAK_LR = {"transformer": 1.5e-3, "lstm": 3e-3}
"""Peak learning rates. They were chosen by accuracy on the test part of SCAN's simple split, with seed 1."""


def sequence_recipe(
    name: str, dataset: Dataset, max_lens: tuple[int, int], *, max_steps: int, peak_lr: float, seed: int = 1
) -> Recipe:
    """Return the recipe of the Transformer. With the task "lstm" of OPEN_TASKS the LSTM trains on the same batches.

    max_lens: source and target, in tokens with end token; tests beyond training length must fit too.
    """
    return Recipe.model_validate(
        dict(
            name=name,
            vocab_size=dataset.vocab_size,
            data=dataset.data,
            model=TRANSFORMER | dict(max_source_len=max_lens[0], max_target_len=max_lens[1]),
            train=dict(
                batch_tokens=512,
                max_steps=max_steps,
                peak_lr=peak_lr,
                warmup_steps=min(100, max_steps),
                schedule="linear",
                label_smoothing=0.0,
                bf16=False,
                checkpoint_every_steps=max(1, max_steps // 4),
                average_last=1,
                patience=1000,
                seed=seed,
            ),
        )
    )


OPEN_TASKS: Mapping[str, Callable[[Any, RunFolders], TrainingTask[Any]]] = {
    "transformer": open_task,
    "lstm": OpenRecurrent(LSTM),
}
"""Trainer's `open_task` for each model."""


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
        return collate(examples_of(self.tokenizer, pairs), self.tokenizer)

    def decode(self, sources: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Decode sources greedily as one batch, see `greedy`."""
        if isinstance(self.model, Transformer):
            return greedy(self.model, sources, max_new_tokens)
        return recurrent_greedy(self.model, sources, max_new_tokens)


def load_sequence_model(path: Path, kind: str) -> SequenceModel:
    """Read a checkpoint directory that Trainer wrote. kind: a name of OPEN_TASKS, transformer or lstm.

    Raises CheckpointError or TokenizerError naming the file.
    """
    if kind == "lstm":
        return SequenceModel(model=load_recurrent(path), tokenizer=Tokenizer.load(path / "tokenizer.json"))
    checkpoint = load_checkpoint(path)
    return SequenceModel(model=checkpoint.model, tokenizer=checkpoint.tokenizer)


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
    config = ModelConfig.model_validate(TRANSFORMER | _sizes(length))
    return BatchLoss(Transformer(config, attention_backend=backend))


def recurrent_loss(length: int) -> RecurrentLoss:
    """Return the loss of an LSTM with random weights for texts of up to `length` tokens."""
    return RecurrentLoss(RecurrentModel(RecurrentConfig.model_validate(LSTM | _sizes(length))))


def _sizes(length: int) -> dict[str, object]:
    return dict(vocab_size=ALGORITHM_VOCAB_SIZE, max_source_len=length, max_target_len=length)


LOSSES: Mapping[str, Callable[[int], nn.Module]] = {
    "Transformer, eager": partial(transformer_loss, "eager"),
    "Transformer, sdpa": partial(transformer_loss, "sdpa"),
    "LSTM": recurrent_loss,
}
"""Losses of whole models by the greatest length of a text, in tokens."""


def random_batch(length: int) -> Batch:
    """Return one row of random tokens, source and target of `length` tokens, all of them labelled."""
    source, inputs, labels = torch.randint(4, ALGORITHM_VOCAB_SIZE, (3, 1, length))
    return Batch(source=source, source_lens=torch.tensor([length], dtype=torch.int32), inputs=inputs, labels=labels)


def step_peak_bytes(step: WeightUpdate) -> int:
    """Return the peak of allocated bytes of one step, beside weights and optimiser state."""
    step.run()  # makes the optimiser state
    return allocated_peak(step.run)


def step_costs(length: int, num_runs: int) -> dict[str, float]:
    """Return MB and the median of ms of a step of every model, named "MODEL, UNIT"."""
    batch = random_batch(length)
    steps = {name: WeightUpdate(make(length), batch) for name, make in LOSSES.items()}
    figures = {f"{name}, MB": step_peak_bytes(step) / 1e6 for name, step in steps.items()}
    times = median_seconds({name: step.run for name, step in steps.items()}, num_runs)
    return figures | {f"{name}, ms": 1e3 * seconds for name, seconds in times.items()}


TRAINING, DECODING = "training, tokens/s", "decoding, tokens/s"


def speeds(models: Mapping[str, SequenceModel], pairs: Sequence[Pair], num_runs: int) -> dict[str, dict[str, float]]:
    """Return TRAINING and DECODING of each model, with all pairs as one batch, from the median of `num_runs` runs.

    End tokens are counted. The models are trained further, after decoding.
    """
    batches = {name: model.batch(pairs) for name, model in models.items()}
    decoders = {name: _decoder(model, batches[name]) for name, model in models.items()}
    produced = {name: sum(decode()) for name, decode in decoders.items()}
    decoding = median_seconds(decoders, num_runs)
    updates = {name: WeightUpdate(model.loss, batches[name]).run for name, model in models.items()}
    training = median_seconds(updates, num_runs)
    return {
        name: {TRAINING: float(batches[name].counts) / training[name], DECODING: produced[name] / decoding[name]}
        for name in models
    }


def _decoder(model: SequenceModel, batch: Batch) -> Callable[[], list[int]]:
    sources = [row[:length].tolist() for row, length in zip(batch.source, batch.source_lens.tolist(), strict=True)]
    return partial(produced_tokens, model, sources, batch.inputs.shape[1])


def produced_tokens(model: SequenceModel, sources: Sequence[Sequence[int]], limit: int) -> list[int]:
    """Decode sources with at most `limit` tokens each; return the number of tokens of each, with its end token."""
    return [min(len(ids) + 1, limit) for ids in model.decode(sources, limit)]


def gradient_by_distance(loss: nn.Module, source_embedding: nn.Embedding, batch: Batch) -> list[float]:
    """Return the mean norm of d loss / d embedding by distance to the end of the source, nearest first.

    loss: BatchLoss or RecurrentLoss of a model in evaluation mode; source_embedding: the encoder's. The loss is that of
    the last target token before the end token, in nats for one example. The norm is that of the embedding's output,
    averaged over the batch. Distance 0 is the source's last word; its end token is left out. In a recurrent model the
    path between two tokens grows with their distance; attention connects them in one step (Vaswani et al. 2017,
    section 4).

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
    return list(norms.flip(0).tolist())


def _last_only(batch: Batch) -> Batch:
    """Return the batch with one label a row: the last one before the end token."""
    num_labels = (batch.labels != IGNORED_LABEL).sum(dim=1)
    if int(num_labels.min()) < 2:
        raise ValueError("a target has no token before its end token; each needs at least one")
    positions = (num_labels - 2)[:, None]
    labels = torch.full_like(batch.labels, IGNORED_LABEL)
    labels.scatter_(1, positions, batch.labels.gather(1, positions))
    return Batch(source=batch.source, source_lens=batch.source_lens, inputs=batch.inputs, labels=labels)
