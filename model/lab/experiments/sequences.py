"""Trials of both sequence models, the Transformer and the LSTM, on one dataset; used by `scan` and `algorithms`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from antiphon.model.checkpoints.checkpoint import load_checkpoint
from antiphon.model.lab.data.datasets import Dataset
from antiphon.model.lab.measures.exact_match import Count, exact_match
from antiphon.model.lab.recurrent.greedy import recurrent_greedy
from antiphon.model.lab.recurrent.recurrent_task import load_recurrent
from antiphon.model.lab.recurrent.sequence_recipes import BUDGETS, OPEN_TASKS, Optimisation, sequence_recipe
from antiphon.model.lab.setting import Setting
from antiphon.model.lab.trial import Figures, Trial
from antiphon.model.training.data.corpus import Pair
from antiphon.model.transformer.greedy import greedy

MODELS = tuple(OPEN_TASKS)


def trials_on(
    setting: Setting, name: str, dataset: Dataset, max_lens: tuple[int, int], steps: Mapping[str, int] | None = None
) -> list[Trial]:
    """Return a trial for each model and seed, named "NAME MODEL". steps: training steps of each model at scale 1."""
    found = []
    for model in MODELS:
        budget = BUDGETS[model]
        max_steps = setting.steps((steps or {}).get(model, budget.max_steps))
        optimisation = Optimisation(max_steps=max_steps, peak_lr=budget.peak_lr)
        found += [
            Trial(
                name=f"{name} {model}",
                recipe=sequence_recipe(f"lab-{name}-{model}", dataset, max_lens, optimisation, seed=seed),
                data=setting.made_data,
                open_task=OPEN_TASKS[model],
            )
            for seed in setting.seeds
        ]
    return found


def model_of(trial: Trial) -> str:
    """Return the model of a trial: transformer or lstm."""
    return trial.name.rpartition(" ")[2]


def exact_figures(trial: Trial, averaged: Path, tests: Mapping[str, Sequence[Pair]]) -> Figures:
    """Return the exact-match accuracy of each test part in percent, and by target length over all parts."""
    if model_of(trial) == "lstm":
        recurrent = load_recurrent(averaged)
        match = partial(exact_match, partial(recurrent_greedy, recurrent.model), recurrent.tokenizer)
    else:
        checkpoint = load_checkpoint(averaged)
        match = partial(exact_match, partial(greedy, checkpoint.model), checkpoint.tokenizer)
    figures: Figures = {}
    by_length: dict[int, Count] = {}
    for name, pairs in tests.items():
        found = match(pairs)
        figures[name] = 100 * found.overall.accuracy
        for length, count in found.by_target_len.items():
            before = by_length.get(length, Count(total=0, correct=0))
            by_length[length] = Count(total=before.total + count.total, correct=before.correct + count.correct)
    figures["by target length"] = {str(length): 100 * by_length[length].accuracy for length in sorted(by_length)}
    return figures
