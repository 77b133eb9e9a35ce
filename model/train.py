"""`antiphon train`: from a recipe to a checkpoint, resumable at any kill, on one device or several through torchrun.

A run folder holds the tokenizer, `checkpoints/step-*` (the newest can be resumed from), metrics.jsonl, loss.png and,
when training ends, `averaged/`: the mean of the last checkpoints, which is what `antiphon export` wants.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from antiphon.model.attention import Backend
from antiphon.model.bundle import Provenance
from antiphon.model.checkpoint import (
    CheckpointError,
    average_weights,
    load_weights,
    read_tensors,
    save_checkpoint,
    weights_of,
)
from antiphon.model.corpus import load_corpus
from antiphon.model.data import IGNORED_LABEL, Batch, Example, collate, encode_pairs, plan_batches, rows_of
from antiphon.model.loss import linear_cross_entropy
from antiphon.model.recipe import Recipe, RecipeError, TrainConfig, load_recipe
from antiphon.model.tokenizer import Tokenizer, TokenizerError
from antiphon.model.transformer import Transformer

RESUMABLE_STATE = ("state.json", "optimizer.safetensors")


@dataclass
class Progress:
    """Where a run stands; written with every checkpoint."""

    step: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    best_loss: float = math.inf
    bad_validations: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The processes of one torchrun; alone, a group of one."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls) -> Group:
        """Join the group that torchrun's environment describes, if any."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        cuda = torch.cuda.is_available()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local) if cuda else torch.device("cpu")
        if size > 1:
            torch.distributed.init_process_group("nccl" if cuda else "gloo")
        return cls(rank=int(os.environ.get("RANK", "0")), size=size, device=device)

    def sum(self, value: Tensor) -> Tensor:
        """Sum over the group, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(value)
        return value


class BatchLoss(nn.Module):
    """The loss of a batch; padding never reaches the vocabulary."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, smoothing: float) -> Tensor:
        """Summed label-smoothed cross entropy (section 5.4) of the labelled positions, in nats."""
        model = self.model
        cross_kv = model.project_memory(model.encode(batch.source, batch.source_lens))
        hidden = model.decode(batch.inputs, cross_kv, batch.source_lens)
        kept = batch.labels != IGNORED_LABEL
        output = model.output
        return linear_cross_entropy(
            hidden[kept], output.weight, batch.labels[kept], smoothing=smoothing, bias=output.bias
        )


def learning_rate(step: int, config: TrainConfig, d_model: int) -> float:
    """Linear warm-up, inverse square root of the step (section 5.3), linear cool-down if any; step counts from 1."""
    peak: float = config.peak_lr or (d_model * config.warmup_steps) ** -0.5
    factor = min(step / config.warmup_steps, math.sqrt(config.warmup_steps / step))
    if config.cooldown_steps:
        factor *= min(1.0, (config.max_steps - step + 1) / config.cooldown_steps)
    return peak * factor


class Trainer:
    """One run of one recipe in one folder."""

    def __init__(self, recipe: Recipe, data_folder: Path, run_folder: Path, group: Group) -> None:
        # oneDNN keeps 1,024 compiled kernels unless told otherwise, too few for every shape of batch.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16384")
        self.recipe = recipe
        self.config = recipe.train
        self.folder = run_folder
        self.group = group
        self.progress = Progress()
        corpus = load_corpus(recipe.data, data_folder)
        self.tokenizer = self._tokenizer([text for pair in corpus.train for text in pair])
        self.model_config = recipe.model_config_for(self.tokenizer.vocab_size)
        limits = dict(max_source=self.model_config.max_source_len, max_target=self.model_config.max_target_len)
        self.train_examples = encode_pairs(corpus.train, self.tokenizer, **limits)
        self.valid_examples = encode_pairs(corpus.valid, self.tokenizer, **limits)
        torch.manual_seed(self.config.seed)
        # On a CPU and short sentences PyTorch's fused kernel makes a step half as fast as plain products do.
        backend: Backend = "sdpa" if group.device.type == "cuda" else "eager"
        self.model = Transformer(self.model_config, attention_backend=backend).to(group.device)
        self.model.checkpoint_layers(self.config.gradient_checkpointing)
        self.batch_loss: nn.Module = BatchLoss(self.model)
        if group.size > 1:
            # The buffers are constants. Sending them at every forward would be a collective that processes with unequal
            # numbers of validation batches do not all take part in.
            self.batch_loss = DistributedDataParallel(self.batch_loss, forward_sync_buffers=False)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), betas=(0.9, self.config.adam_beta2), eps=self.config.adam_epsilon, fused=True
        )

    def _tokenizer(self, texts: list[str]) -> Tokenizer:
        path = self.folder / "tokenizer.json"
        if not path.is_file() and self.group.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".tmp")
            Tokenizer.train(texts, self.recipe.vocab_size).save(unfinished)
            unfinished.replace(path)
        if self.group.size > 1:
            torch.distributed.barrier()
        return Tokenizer.load(path)

    @property
    def provenance(self) -> Provenance:
        """What a bundle made from this run must say of its data."""
        data = self.recipe.data
        return Provenance(
            source=data.origin, licence=data.licence, attribution=data.attribution, recipe=self.recipe.name
        )

    def checkpoints(self) -> list[Path]:
        """Checkpoint folders of this run, oldest first."""
        return sorted((self.folder / "checkpoints").glob("step-*"))

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        found = self.checkpoints()
        if not found:
            return
        newest = found[-1]
        load_weights(self.model, newest / "model.safetensors")
        saved = read_tensors(newest / "optimizer.safetensors")
        state = self.optimizer.state_dict()
        state["state"] = {
            index: {part: saved[f"{index}.{part}"] for part in ("step", "exp_avg", "exp_avg_sq")}
            for index in state["param_groups"][0]["params"]
        }
        self.optimizer.load_state_dict(state)
        self.progress = Progress(**json.loads((newest / "state.json").read_text()))

    def save(self) -> None:
        """Write a checkpoint to resume from; older ones keep weights only, and only as many as are averaged."""
        if self.group.rank:
            return
        state = self.optimizer.state_dict()["state"]
        optimizer = {f"{index}.{part}": value for index, parts in state.items() for part, value in parts.items()}
        older = self.checkpoints()
        save_checkpoint(
            self.folder / "checkpoints" / f"step-{self.progress.step:07d}",
            config=self.model_config,
            weights=weights_of(self.model),
            tokenizer=self.tokenizer,
            provenance=self.provenance,
            extra={"optimizer": optimizer},
            state=vars(self.progress),
        )
        for path in older:
            for name in RESUMABLE_STATE:
                (path / name).unlink(missing_ok=True)
        for path in self.checkpoints()[: -self.config.average_last]:
            shutil.rmtree(path)

    def loss(self, batch: Batch) -> tuple[Tensor, int]:
        """Summed cross entropy, in nats, and the number of labels; smoothed in training only."""
        smoothing = self.config.label_smoothing if self.model.training else 0.0
        with torch.autocast(self.group.device.type, dtype=torch.bfloat16, enabled=self.config.bf16):
            return self.batch_loss(batch, smoothing), int((batch.labels != IGNORED_LABEL).sum())

    def train_step(self, batch: Batch) -> float:
        """One update; returns the loss per token over the group."""
        step = self.progress.step + 1
        # Dropout is keyed by the step, so that a resumed run draws what the uninterrupted one would have drawn.
        torch.manual_seed(hash((self.config.seed, step, self.group.rank)))
        for settings in self.optimizer.param_groups:
            settings["lr"] = learning_rate(step, self.config, self.model_config.d_model)
        total, labels = self.loss(batch)
        counts = self.group.sum(torch.tensor([total.item(), labels], dtype=torch.float64, device=self.group.device))
        # DistributedDataParallel takes the mean over processes; the update wants the mean over tokens.
        (total * self.group.size / counts[1].item()).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step = step
        return float(counts[0] / counts[1])

    @torch.no_grad()
    def validate(self) -> float:
        """Cross entropy per token of the validation part, in nats, without smoothing."""
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.group.device)
        plan = plan_batches(self.valid_examples, self.config.batch_tokens, seed=0)
        for indices in plan[self.group.rank :: self.group.size]:
            total, labels = self.loss(self._batch(self.valid_examples, indices))
            sums += torch.tensor([total.item(), labels], dtype=torch.float64, device=self.group.device)
        self.model.train()
        self.group.sum(sums)
        return float(sums[0] / sums[1])

    def _batch(self, examples: list[Example], indices: list[int]) -> Batch:
        chosen = [examples[i] for i in indices]
        rows = rows_of(max(len(e.target) for e in chosen) + 1, self.config.batch_tokens)
        config = self.model_config
        batch = collate(chosen, self.tokenizer, rows).within(config.max_source_len, config.max_target_len)
        return batch.to(self.group.device)

    def run(self) -> Path | None:
        """Train to the end; returns the averaged checkpoint (None on ranks other than 0)."""
        self.resume()
        self.model.train()
        last_step = self._last_step()
        with tqdm(total=last_step, initial=self.progress.step, unit="step", disable=self._quiet()) as bar:
            while not self._finished():
                self._run_epoch(bar, last_step)
        return self._average() if self.group.rank == 0 else None

    def _last_step(self) -> int:
        """The step at which training ends unless it stops early; raises RecipeError where there is none."""
        per_epoch = len(plan_batches(self.train_examples, self.config.batch_tokens, seed=0)) // self.group.size
        if per_epoch < 1:
            raise RecipeError(f"data: {len(self.train_examples)} training pairs fill no batch for each process")
        return min(self.config.max_steps, per_epoch * self.config.max_epochs)

    def _quiet(self) -> bool:
        return self.group.rank > 0 or not sys.stderr.isatty()

    def _finished(self) -> bool:
        progress, config = self.progress, self.config
        return (
            progress.step >= config.max_steps
            or progress.epoch >= config.max_epochs
            or progress.bad_validations >= config.patience
        )

    def _run_epoch(self, bar: tqdm[NoReturn], last_step: int) -> None:
        progress = self.progress
        plan = plan_batches(
            self.train_examples, self.config.batch_tokens, seed=self.config.seed * 1_000_003 + progress.epoch
        )
        rounds = len(plan) // self.group.size
        while progress.batch_in_epoch < rounds and not self._finished():
            indices = plan[progress.batch_in_epoch * self.group.size + self.group.rank]
            loss = self.train_step(self._batch(self.train_examples, indices))
            progress.batch_in_epoch += 1
            bar.update()
            bar.set_postfix(epoch=progress.epoch, loss=f"{loss:.3f}")
            if progress.step % self.config.checkpoint_every_steps == 0 or progress.step == last_step:
                self._checkpoint(loss)
        if progress.batch_in_epoch >= rounds:
            progress.epoch += 1
            progress.batch_in_epoch = 0

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
            with (self.folder / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps({**record, "valid_loss": valid_loss}) + "\n")
            plot_losses(self.folder / "metrics.jsonl", self.folder / "loss.png")

    def _average(self) -> Path:
        paths = self.checkpoints()[-self.config.average_last :]
        target = self.folder / "averaged"
        save_checkpoint(
            target,
            config=self.model_config,
            weights=average_weights(paths),
            tokenizer=self.tokenizer,
            provenance=self.provenance,
        )
        return target


def plot_losses(metrics: Path, target: Path) -> None:
    """Draw training and validation loss, nats per token, against steps."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, label in (("train_loss", "training (label-smoothed)"), ("valid_loss", "validation")):
        axes.plot([r["step"] for r in records], [r[name] for r in records], label=label)
    axes.set(xlabel="step", ylabel="nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `antiphon train`."""
    parser.add_argument("recipe", help="a recipe's name (tatoeba-en-de, multi30k-en-de) or the path of a TOML file")
    parser.add_argument("--data", type=Path, required=True, help="folder that holds the files the recipe names")
    parser.add_argument("--output", type=Path, help="run folder; resumes the run found there (default runs/RECIPE)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all)")


def run(args: argparse.Namespace) -> int:
    """Entry point of `antiphon train`; returns the exit code."""
    try:
        if args.threads is not None:
            if args.threads < 1:
                raise RecipeError(f"--threads is {args.threads}; it must be at least 1")
            torch.set_num_threads(args.threads)
        recipe = load_recipe(args.recipe)
        group = Group.join()
        trainer = Trainer(recipe, args.data, args.output or Path("runs") / recipe.name, group)
        averaged = trainer.run()
    except (RecipeError, CheckpointError, TokenizerError, OSError) as error:
        print(f"antiphon train: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("antiphon train: interrupted; the same command resumes from the last checkpoint", file=sys.stderr)
        return 130
    if averaged is not None:
        print(averaged)
    return 0
