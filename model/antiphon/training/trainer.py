"""Training of a recipe, on one device or on several with torchrun; a killed run can be resumed.

A run folder has the tokenizer, `checkpoints/step-*` (training resumes from the newest), metrics.jsonl and loss.png. At
the end of training it also has `averaged/`, the mean of the last checkpoints, for `antiphon export`. The recipe's task
defines model, data and loss, see task.py.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from tqdm import tqdm

from antiphon.checkpoints.checkpoint import (
    Checkpoint,
    average_weights,
    load_weights,
    read_tensors,
    save_checkpoint,
    weights_of,
)
from antiphon.errors import RecipeError, TrainingDiverged
from antiphon.ops.attention import Backend
from antiphon.training.attention_entropy import recorded_entropies
from antiphon.training.distill import DistillTask
from antiphon.training.fine_tune import FineTuneTask
from antiphon.training.language_model import LanguageModelTask
from antiphon.training.masked_model import PretrainTask
from antiphon.training.optimizer import Optimizer
from antiphon.training.recipe import AnyRecipe, LanguageModelRecipe, PretrainRecipe, Recipe, TrainConfig
from antiphon.training.task import AnyBatch, Group, RunFolders, TrainingTask
from antiphon.training.translation import TranslationTask
from antiphon.transformer.transformer import Transformer

RESUMABLE_STATE = ("state.json", "optimizer.safetensors")


@dataclass
class Progress:
    """Progress of a run, written with every checkpoint."""

    step: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    best_loss: float = math.inf
    bad_validations: int = 0


def learning_rate(step: int, config: TrainConfig, d_model: int) -> float:
    """Return the learning rate of a step, counted from 1: linear warm-up, schedule, linear cool-down if set.

    Warm-up and inverse square root: Vaswani et al. 2017, section 5.3.
    """
    peak: float = config.peak_lr or (d_model * config.warmup_steps) ** -0.5
    remaining = config.max_steps - step + 1
    if config.schedule == "linear":
        factor = min(step / config.warmup_steps, remaining / max(1, config.max_steps - config.warmup_steps), 1.0)
    else:
        factor = min(step / config.warmup_steps, math.sqrt(config.warmup_steps / step))
    if config.cooldown_steps:
        factor *= min(1.0, remaining / config.cooldown_steps)
    return peak * factor


def open_task(recipe: AnyRecipe, folders: RunFolders) -> TrainingTask[Any]:
    """Return the recipe's task after reading its data. Raises RecipeError, CheckpointError or TokenizerError."""
    if isinstance(recipe, Recipe):
        return TranslationTask(recipe, folders)
    if isinstance(recipe, PretrainRecipe):
        return PretrainTask(recipe, folders) if recipe.distillation is None else DistillTask(recipe, folders)
    if isinstance(recipe, LanguageModelRecipe):
        return LanguageModelTask(recipe, folders)
    return FineTuneTask(recipe, folders)


class Trainer:
    """Training run of one recipe in one folder.

    init: checkpoint to start from; keep_weights: use its weights, not only its shape and tokenizer.
    teacher: checkpoint to learn from, for a recipe with distillation.
    open_task: returns the recipe's task; a model that is only trained has a task of its own.
    Raises RecipeError, CheckpointError or TokenizerError.
    """

    def __init__(
        self,
        recipe: AnyRecipe,
        data_folder: Path,
        run_folder: Path,
        group: Group,
        *,
        init: Checkpoint | None = None,
        keep_weights: bool = True,
        teacher: Checkpoint | None = None,
        open_task: OpenTask = open_task,
    ) -> None:
        # By default oneDNN caches 1,024 compiled kernels, which is too few for all shapes of batches.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
        self.recipe = recipe
        self.folder = run_folder
        self.group = group
        self.progress = Progress()
        folders = RunFolders(
            data=data_folder, run=run_folder, group=group, init=init, keep_weights=keep_weights, teacher=teacher
        )
        self.task = open_task(recipe, folders)
        self._folders = folders
        self._open_task = open_task
        self._gradient_norms: list[Tensor] = []  # since the last checkpoint
        self.model_config = self.task.config
        self.config = self._config()
        self.uses_bf16 = self.config.bf16 and group.computes_bf16
        torch.manual_seed(self.config.seed)
        # On a CPU with short sentences a step with PyTorch's fused kernel takes twice as long as with plain products.
        backend: Backend = "sdpa" if group.device.type == "cuda" else "eager"
        self.model = self.task.make_model(backend).to(group.device)
        if isinstance(self.model, Transformer):
            self.model.checkpoint_layers(self.config.gradient_checkpointing)
        self.batch_loss: nn.Module = self.task.make_loss(self.model)
        if group.size > 1:
            # Buffers are constants. Synchronising them in every forward pass would be a collective operation, in which
            # processes with fewer validation batches would not take part.
            self.batch_loss = DistributedDataParallel(self.batch_loss, forward_sync_buffers=False)
        self.optimizer = Optimizer(self.model, self.config)

    def _config(self) -> TrainConfig:
        """Return the recipe's settings with max_steps limited by max_epochs, but not below min_steps.

        Raises RecipeError without batches.
        """
        config = self.recipe.train
        per_epoch = len(self.task.batches("train", 0)) // self.group.size
        if per_epoch < 1:
            raise RecipeError(
                f"data: the training part has too few texts; {self.group.size} processes need a batch each"
            )
        longest = max(per_epoch * config.max_epochs, config.min_steps)
        return config.model_copy(update={"max_steps": min(config.max_steps, longest)})

    def checkpoints(self) -> list[Path]:
        """Return the checkpoint folders of this run, oldest first."""
        return sorted((self.folder / "checkpoints").glob("step-*"))

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        checkpoints = self.checkpoints()
        if not checkpoints:
            return
        newest = checkpoints[-1]
        load_weights(self.model, newest / "model.safetensors")
        self.optimizer.load(read_tensors(newest / "optimizer.safetensors"))
        self.progress = Progress(**json.loads((newest / "state.json").read_text()))

    def save(self) -> None:
        """Write a checkpoint with optimiser state; older ones keep only weights, and only average_last remain."""
        if self.group.rank:
            return
        older = self.checkpoints()
        self._write(
            self.folder / "checkpoints" / f"step-{self.progress.step:07d}",
            weights_of(self.model),
            extra={"optimizer": self.optimizer.state()},
            state=asdict(self.progress),
        )
        for path in older:
            for name in RESUMABLE_STATE:
                (path / name).unlink(missing_ok=True)
        for path in self.checkpoints()[: -self.config.average_last]:
            shutil.rmtree(path)

    def _write(
        self,
        path: Path,
        weights: dict[str, Tensor],
        extra: dict[str, dict[str, Tensor]] | None = None,
        state: dict[str, object] | None = None,
    ) -> None:
        save_checkpoint(
            path,
            config=self.model_config,
            weights=weights,
            tokenizer=self.task.tokenizer,
            text=self.task.text,
            text_folder=self.folder,
            provenance=self.task.provenance,
            extra=extra,
            state=state,
        )

    def loss(self, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Return the summed cross entropy of each of the task's K losses, in nats, and the numbers of labels.

        Both are [K]. Labels are smoothed only in training mode.
        """
        smoothing = self.config.label_smoothing if self.batch_loss.training else 0.0
        with torch.autocast(self.group.device.type, dtype=torch.bfloat16, enabled=self.uses_bf16):
            return self.batch_loss(batch, smoothing), batch.counts

    def train_step(self, batch: AnyBatch) -> float:
        """Update the model once; return the loss per label over the group, summed over the task's losses.

        Raises TrainingDiverged if that loss is not finite.
        """
        step = self.progress.step + 1
        # The seed of dropout depends on the step, so that a resumed run has the same dropout as an uninterrupted one.
        torch.manual_seed(hash((self.config.seed, step, self.group.rank)))
        sums, counts = self.loss(batch)
        totals = self.group.sum(torch.stack([sums.detach().double(), counts]))
        # DistributedDataParallel averages over processes, but the update needs the mean over labels.
        (sums * (self.group.size / totals[1].clamp(min=1))).sum().backward()  # type: ignore[no-untyped-call]
        self._gradient_norms.append(nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm))
        self.optimizer.step(learning_rate(step, self.config, self.model_config.d_model))
        self.progress.step = step
        loss = float((totals[0] / totals[1].clamp(min=1)).sum())
        if not math.isfinite(loss):
            raise TrainingDiverged(f"loss is {loss} in step {step}; lower train.peak_lr or raise train.warmup_steps")
        return loss

    @torch.no_grad()
    def validate(self) -> float:
        """Return the cross entropy per label of the validation part, without smoothing, summed over the losses."""
        self.batch_loss.eval()
        batches = self.task.batches("valid", 0)
        sums = torch.zeros(2, self.task.num_losses, dtype=torch.float64, device=self.group.device)
        for index in range(self.group.rank, len(batches), self.group.size):
            losses, counts = self.loss(batches[index].to(self.group.device))
            sums += torch.stack([losses.double(), counts])
        self.batch_loss.train()
        self.group.sum(sums)
        return float((sums[0] / sums[1].clamp(min=1)).sum())

    def run(self) -> Path | None:
        """Train to the end; return the folder of the averaged checkpoint, None on ranks other than 0."""
        self.resume()
        self.batch_loss.train()
        with tqdm(total=self.config.max_steps, initial=self.progress.step, unit="step", disable=self._quiet()) as bar:
            batches = self._batches()
            while not self._finished():
                self._step_and_show(next(batches), bar)
        return self._average() if self.group.rank == 0 else None

    def _quiet(self) -> bool:
        return self.group.rank > 0 or not sys.stderr.isatty()

    def _finished(self) -> bool:
        progress, config = self.progress, self.config
        return progress.step >= config.max_steps or progress.bad_validations >= config.patience

    def _batches(self) -> Iterator[tuple[Place, AnyBatch]]:
        place = Place(epoch=self.progress.epoch, batch=self.progress.batch_in_epoch)
        if self.group.device.type == "cuda":
            return batches_beside(self._open_task, self.recipe, self._folders, place)
        return batches_from(self.task, place, self._folders, self.config.seed)

    def _step_and_show(self, placed: tuple[Place, AnyBatch], bar: tqdm[NoReturn]) -> None:
        progress, (behind, batch) = self.progress, placed
        loss = self.train_step(batch.to(self.group.device))
        progress.epoch, progress.batch_in_epoch = behind.epoch, behind.batch
        bar.update()
        bar.set_postfix(epoch=progress.epoch, loss=f"{loss:.3f}")
        if progress.step % self.config.checkpoint_every_steps == 0 or progress.step == self.config.max_steps:
            self._checkpoint(loss)

    def _checkpoint(self, train_loss: float) -> None:
        valid_loss = self.validate()
        progress = self.progress
        if valid_loss < progress.best_loss:
            progress.best_loss, progress.bad_validations = valid_loss, 0
        else:
            progress.bad_validations += 1
        self.save()
        if self.group.rank == 0:
            record = {"time": time.time(), "step": progress.step, "epoch": progress.epoch, "train_loss": train_loss}
            self.batch_loss.eval()
            scores = {**self._norms_and_entropies(), **self.task.scores(self.model, "valid")}
            self.batch_loss.train()
            with (self.folder / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps({**record, "valid_loss": valid_loss, **scores}) + "\n")
            plot_losses(self.folder / "metrics.jsonl", self.folder / "loss.png")

    @torch.no_grad()
    def _norms_and_entropies(self) -> dict[str, float]:
        """Return norms of the gradient before clipping since the last checkpoint, and entropies of attention."""
        norms = torch.stack(self._gradient_norms)
        self._gradient_norms = []
        measures = {"gradient_norm": float(norms.mean()), "max_gradient_norm": float(norms.max())}
        batches = self.task.batches("valid", 0)
        if len(batches):
            # Rows without labels fill up some batches; the fullest one of the first eight has the fewest of them.
            fullest = max(
                (batches[index] for index in range(min(8, len(batches)))), key=lambda b: float(b.counts.sum())
            )
            with recorded_entropies(self.model) as entropies:
                self.loss(fullest.to(self.group.device))
            measures.update({f"entropy_{kind}": value for kind, value in entropies.mean().items()})
        return measures

    def _average(self) -> Path:
        target = self.folder / "averaged"
        self._write(target, average_weights(self.checkpoints()[-self.config.average_last :]))
        averaged = copy.deepcopy(self.model).eval()
        load_weights(averaged, target / "model.safetensors")
        if scores := self.task.scores(averaged, "test"):
            (target / "scores.json").write_text(json.dumps(scores, indent=2) + "\n", encoding="utf-8")
        return target


OpenTask = Callable[[Any, RunFolders], TrainingTask[Any]]
_NUM_WAITING = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Place in a run: epoch, and batch of that epoch for every process of the group."""

    epoch: int
    batch: int


def batches_from(task: TrainingTask[Any], place: Place, folders: RunFolders, seed: int) -> Iterator[tuple[Place, Any]]:
    """Yield the training batches of this process from a place on, without end, each with the place behind it."""
    group, epoch, first = folders.group, place.epoch, place.batch
    while True:
        batches = task.batches("train", seed * 1_000_003 + epoch)
        for index in range(first, len(batches) // group.size):
            yield Place(epoch=epoch, batch=index + 1), batches[index * group.size + group.rank]
        epoch, first = epoch + 1, 0


def batches_beside(
    open_task: OpenTask, recipe: AnyRecipe, folders: RunFolders, place: Place
) -> Iterator[tuple[Place, AnyBatch]]:
    """Yield what `batches_from` yields, from a process that opens the recipe's task too and stays 64 batches ahead."""
    # The process never uses the GPU: a CUDA context would take memory there.
    beside = replace(folders, group=replace(folders.group, device=torch.device("cpu")))
    stream = _Stream(open_task, recipe, beside, place)
    # Spawned: a forked process could use neither CUDA nor the threads of the tokenizer.
    loader: DataLoader[Any] = DataLoader(
        stream, batch_size=None, num_workers=1, prefetch_factor=_NUM_WAITING, multiprocessing_context="spawn"
    )
    yield from loader


@dataclass(frozen=True, eq=False)
class _Stream(IterableDataset[Any]):
    open_task: OpenTask
    recipe: AnyRecipe
    folders: RunFolders
    place: Place

    def __iter__(self) -> Iterator[tuple[Place, Any]]:
        task = self.open_task(self.recipe, self.folders)
        return batches_from(task, self.place, self.folders, self.recipe.train.seed)


def plot_losses(metrics: Path, target: Path) -> None:
    """Draw training and validation loss, in nats per label, over steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, label in (("train_loss", "training (label-smoothed)"), ("valid_loss", "validation")):
        axes.plot([r["step"] for r in records], [r[name] for r in records], label=label)
    axes.set(xlabel="step", ylabel="nats per label")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
