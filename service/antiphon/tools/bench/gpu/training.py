"""First step of a training in which a number is not finite, and the tensor that was the first.

Runs the first steps of a recipe with its own batches, seeds and optimiser, once for each precision. Needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from antiphon.errors import TrainingDiverged
from antiphon.tools.bench.gpu.reports import Figure
from antiphon.training.recipe import AnyRecipe
from antiphon.training.task import Group, RunFolders
from antiphon.training.trainer import Place, Trainer, batches_from


class FiniteChecks:
    """Notes of each step which tensors are finite: outputs of modules, gradients and parameters, as they are computed.

    The notes stay on the device until the end of the step, so that a step does not wait for each of them.
    """

    def __init__(self, loss: nn.Module) -> None:
        self._loss = loss
        self._names: list[str] = []
        self._flags: list[Tensor] = []
        for name, module in loss.named_modules():
            module.register_forward_hook(partial(self._forward, name or "loss"))
        for name, parameter in loss.named_parameters():
            if parameter.requires_grad:
                hook = partial(self._gradient, name)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def first_not_finite(self) -> str | None:
        """Return the first tensor of the step that is not finite, its parameters after the update included; or None.

        Starts the notes of the next step.
        """
        for name, parameter in self._loss.named_parameters():
            self._note(f"parameter {name} after the update", parameter)
        is_finite = torch.stack(self._flags).tolist()
        names, self._names, self._flags = self._names, [], []
        return next((name for name, flag in zip(names, is_finite, strict=True) if not flag), None)

    def _forward(self, name: str, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        for output in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(output, Tensor) and output.is_floating_point():
                self._note(f"output of {name}", output)

    def _gradient(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._note(f"gradient of {name}", parameter.grad)

    def _note(self, name: str, values: Tensor) -> None:
        self._names.append(name)
        self._flags.append(torch.isfinite(values.detach()).all())


def first_not_finite(
    recipe: AnyRecipe, data: Path, work: Path, num_steps: int, device: torch.device
) -> Iterator[Figure]:
    """Yield for bfloat16 and float32: steps that ran, the last loss, and the first step and tensor that was not finite.

    `step` and `tensor` are None if all were finite. work: folder that keeps the tokenizer. Raises RecipeError.
    """
    group = Group(rank=0, size=1, device=device)
    folders = RunFolders(data=data, run=work / recipe.name, group=group)
    for precision in ("bfloat16", "float32"):
        trainer = Trainer(recipe, data, folders.run, group)
        trainer.uses_bf16 = precision == "bfloat16"
        trainer.batch_loss.train()
        yield {"precision": precision, "recipe": recipe.name, **_run(trainer, folders, num_steps)}


def _run(trainer: Trainer, folders: RunFolders, num_steps: int) -> Figure:
    checks, loss = FiniteChecks(trainer.batch_loss), None
    batches = batches_from(trainer.task, Place(epoch=0, batch=0), folders, trainer.config.seed)
    for step in range(1, num_steps + 1):
        _, batch = next(batches)
        with suppress(TrainingDiverged):  # the checks name the tensor
            loss = trainer.train_step(batch.to(trainer.group.device))
        tensor = checks.first_not_finite()
        if tensor is not None:
            return {"steps": step, "loss": loss, "step": step, "tensor": tensor}
    return {"steps": num_steps, "loss": loss, "step": None, "tensor": None}
