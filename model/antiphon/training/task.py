"""Training tasks: what the loop in trainer.py needs of a recipe's model, batches, losses and scores.

The tasks are in translation.py, masked_model.py, distill.py, fine_tune.py and language_model.py.
"""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.bundle.manifest import Provenance
from antiphon.checkpoints.checkpoint import Checkpoint, Shape
from antiphon.ops.attention import Backend
from antiphon.text.format import TextFormat
from antiphon.text.tokenizer import Tokenizer, open_tokenizer
from antiphon.training.corpus import Part
from antiphon.training.recipe import AnyRecipe
from antiphon.transformer.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rank, size and device of this process in its group; without torchrun a group of one."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls) -> Group:
        """Join the group of torchrun's environment variables, or a group of one without them."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        cuda = torch.cuda.is_available()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if size > 1:
            torch.distributed.init_process_group("nccl" if cuda else "gloo")
            # Ends the group's threads while the interpreter lives: one that needs it afterwards aborts the process.
            atexit.register(torch.distributed.destroy_process_group)
        return cls(rank=int(os.environ.get("RANK", "0")), size=size, device=device)

    @property
    def computes_bf16(self) -> bool:
        """True if the device multiplies bfloat16 matrices in hardware. Without it they take longer than in float32."""
        if self.device.type == "cuda":
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
        cpu = torch.cpu.get_capabilities()
        return cpu["architecture"] != "x86_64" or bool(cpu["avx512_bf16"] or cpu["amx_bf16"])

    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor over the group, in place, and return it."""
        if self.size > 1:
            torch.distributed.all_reduce(value)
        return value

    def wait(self) -> None:
        """Wait until all processes of the group have called this method."""
        if self.size > 1:
            torch.distributed.barrier()


class AnyBatch(Protocol):
    """Tensors of one step."""

    def to(self, device: torch.device) -> Self:
        """Return the batch on a device."""
        ...

    @property
    def counts(self) -> Tensor:
        """Number of labels of each of K losses, [K] float64."""
        ...


class Batches(Protocol):
    """Batches of one epoch; the same index gives the same batch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> AnyBatch: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolders:
    """Data folder, run folder and process group of a run.

    init: checkpoint that training starts from; None: random weights.
    keep_weights: True: use the weights of init; False: only its shape and tokenizer.
    teacher: checkpoint that the model learns from, of which it has the tokenizer; None without distillation.
    """

    data: Path
    run: Path
    group: Group
    init: Checkpoint | None = None
    keep_weights: bool = True
    teacher: Checkpoint | None = None


Model = TypeVar("Model", bound=nn.Module)


class TrainingTask(Protocol[Model]):
    """Model and data of one recipe. num_losses: number K of losses, one for each kind of label."""

    tokenizer: Tokenizer
    text: TextFormat
    num_losses: int

    @property
    def config(self) -> Shape:
        """Shape of the model."""
        ...

    @property
    def provenance(self) -> Provenance:
        """Origin and licence of the data and of the initial weights, for the bundle."""
        ...

    def make_model(self, backend: Backend) -> Model:
        """Return the model to train, with the initial weights or with random ones from torch's global generator."""
        ...

    def make_loss(self, model: Model) -> nn.Module:
        """Return a module from (batch, smoothing) to the summed cross entropy of each loss, [K], in nats."""
        ...

    def batches(self, part: Part, seed: int) -> Batches:
        """Return the batches of one epoch; they depend only on the seed."""
        ...

    def scores(self, model: Model, part: Part) -> dict[str, float]:
        """Return measures on a part, by name; empty if the loss is enough. The model is in evaluation mode."""
        ...


AnyKind = TypeVar("AnyKind", bound=AnyRecipe)


class TransformerTask(Generic[AnyKind]):
    """Shared part of every TrainingTask of a Transformer; the subclasses set the attributes."""

    num_losses = 1
    recipe: AnyKind
    folders: RunFolders
    config: ModelConfig

    @property
    def provenance(self) -> Provenance:
        """Origin of data and initial weights, see TrainingTask."""
        return provenance_of(self.recipe, self.folders.init)

    def make_model(self, backend: Backend) -> Transformer:
        """Return the model to train, see TrainingTask."""
        model, folders = Transformer(self.config, attention_backend=backend), self.folders
        if folders.init is not None and folders.keep_weights:
            weights = folders.init.model.state_dict()  # it can have heads that the model does not have
            model.load_state_dict({name: weights[name] for name in model.state_dict()})
        return model

    def scores(self, model: Transformer, part: Part) -> dict[str, float]:
        """Return no measures, see TrainingTask; the loss is enough."""
        return {}


def run_tokenizer(folders: RunFolders, train: Callable[[], Tokenizer], text: TextFormat | None = None) -> Tokenizer:
    """Return the tokenizer of the run folder; without one, rank 0 copies a given one or trains one with `train`.

    A given one is that of init or of the teacher. text: text format of the trained tokenizer; None: byte-level BPE.
    """
    init = folders.init or folders.teacher
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
    text = text if init is None else init.text
    return Tokenizer.load(folders.run / "tokenizer.json") if text is None else open_tokenizer(folders.run, text)


def provenance_of(recipe: AnyRecipe, init: Checkpoint | None) -> Provenance:
    """Return origin and licence of a run: those of its data, and those of its initial weights."""
    data = recipe.data
    of_data = Provenance(source=data.origin, licence=data.licence, attribution=data.attribution, recipe=recipe.name)
    if init is None or init.provenance is None:
        return of_data
    first = init.provenance

    def joined(*values: str | None) -> str:
        return "; ".join(dict.fromkeys(value for value in values if value))

    return Provenance(
        source=joined(first.source, of_data.source),
        licence=joined(first.licence, of_data.licence),
        attribution=joined(first.attribution, of_data.attribution),
        recipe=joined(first.recipe, of_data.recipe),
    )
