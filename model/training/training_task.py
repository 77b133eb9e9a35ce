"""What a run learns, as train.py's loop sees it: a model, batches of each part of the data, losses and scores.

The tasks: translation_task.py, pretrain_task.py, fine_tune_task.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor, nn

from antiphon.model.bundle.manifest import Provenance
from antiphon.model.checkpoints.checkpoint import Checkpoint
from antiphon.model.config import ModelConfig
from antiphon.model.ops.attention import Backend
from antiphon.model.text.format import TextFormat
from antiphon.model.text.tokenizer import Tokenizer, open_tokenizer
from antiphon.model.training.group import Group
from antiphon.model.training.recipe import AnyRecipe
from antiphon.model.training.text_files import Part
from antiphon.model.transformer.transformer import Transformer


class AnyBatch(Protocol):
    """Tensors of one step."""

    def to(self, device: torch.device) -> Self:
        """The same batch on a device."""
        ...

    @property
    def counts(self) -> Tensor:
        """Labels of each loss, [K] float64."""
        ...


class Batches(Protocol):
    """Batches of one epoch; the same index gives the same batch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> AnyBatch: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolders:
    """Where a task reads data and keeps files of its run, and with whom.

    init: the checkpoint that training starts from, None for random weights.
    keep_weights: whether its weights are taken, or its shape and tokenizer alone.
    """

    data: Path
    run: Path
    group: Group
    init: Checkpoint | None = None
    keep_weights: bool = True


class TrainingTask(Protocol):
    """One recipe's model and data, opened."""

    tokenizer: Tokenizer
    text: TextFormat
    config: ModelConfig
    num_losses: int

    @property
    def provenance(self) -> Provenance:
        """What a bundle made from this run must say of its data."""
        ...

    def make_model(self, backend: Backend) -> Transformer:
        """The model to train: random weights, drawn from torch's generator, or those it starts from."""
        ...

    def make_loss(self, model: Transformer) -> nn.Module:
        """A module of (batch, smoothing) -> summed cross entropy of each loss, [K], in nats."""
        ...

    def batches(self, part: Part, seed: int) -> Batches:
        """One epoch; a function of the seed alone."""
        ...

    def scores(self, model: Transformer, part: Part) -> dict[str, float]:
        """What the model, in evaluation mode, reaches on a part, by measure; empty where the loss says all."""
        ...


def run_tokenizer(folders: RunFolders, train: Callable[[], Tokenizer]) -> Tokenizer:
    """The run folder's tokenizer: the one found there, the initial checkpoint's, or one trained now by one process."""
    init = folders.init
    if folders.group.rank == 0:
        folders.run.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json",) if init is None else init.text.files:
            path = folders.run / name
            unfinished = path.with_name(f".{name}.tmp")
            if path.is_file():
                continue
            if init is None:
                train().save(unfinished)
            else:
                shutil.copyfile(init.text_folder / name, unfinished)
            unfinished.replace(path)
    folders.group.wait()
    return Tokenizer.load(folders.run / "tokenizer.json") if init is None else open_tokenizer(folders.run, init.text)


def start_model(config: ModelConfig, backend: Backend, folders: RunFolders) -> Transformer:
    """A model of random weights, or of the initial checkpoint's, whose configuration differs in heads left out only."""
    model = Transformer(config, attention_backend=backend)
    if folders.init is not None and folders.keep_weights:
        weights = folders.init.model.state_dict()
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model


def provenance_of(recipe: AnyRecipe, init: Checkpoint | None) -> Provenance:
    """What a bundle made from a run must say: its data's origin, and that of the weights it started from."""
    data = recipe.data
    own = Provenance(source=data.origin, licence=data.licence, attribution=data.attribution, recipe=recipe.name)
    if init is None or init.provenance is None:
        return own
    first = init.provenance

    def joined(*values: str | None) -> str:
        return "; ".join(dict.fromkeys(value for value in values if value))

    return Provenance(
        source=joined(first.source, own.source),
        licence=joined(first.licence, own.licence),
        attribution=joined(first.attribution, own.attribution),
        recipe=joined(first.recipe, own.recipe),
    )
