"""Trials of both sequence models, the Transformer and the LSTM, on one dataset; used by `scan` and `algorithms`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from antiphon.lab.data.datasets import Dataset
from antiphon.lab.measures.exact_match import Count, exact_match
from antiphon.lab.measures.sequence_models import load_sequence_model
from antiphon.lab.recurrent.sequence_recipes import OPEN_TASKS, PEAK_LR, Optimisation, sequence_recipe
from antiphon.lab.setting import Setting
from antiphon.lab.trial import Figures, Trial
from antiphon.training.corpus import Pair

MODELS = tuple(OPEN_TASKS)


def trials_on(
    setting: Setting, name: str, dataset: Dataset, max_lens: tuple[int, int], steps: Mapping[str, int]
) -> list[Trial]:
    """Return a trial for each model and seed, named "NAME MODEL". steps: training steps of each model at scale 1."""
    optimisations = {
        model: Optimisation(max_steps=setting.steps(steps[model]), peak_lr=PEAK_LR[model]) for model in MODELS
    }
    found = []
    for model in MODELS:
        found += [
            Trial(
                name=f"{name} {model}",
                recipe=sequence_recipe(f"lab-{name}-{model}", dataset, max_lens, optimisations[model], seed=seed),
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
    model = load_sequence_model(averaged, model_of(trial))
    figures: Figures = {}
    by_length: dict[int, Count] = {}
    for name, pairs in tests.items():
        found = exact_match(model.decode, model.tokenizer, pairs)
        figures[name] = 100 * found.overall.accuracy
        for length, count in found.by_target_len.items():
            before = by_length.get(length, Count(total=0, correct=0))
            by_length[length] = Count(total=before.total + count.total, correct=before.correct + count.correct)
    figures["by target length"] = {str(length): 100 * by_length[length].accuracy for length in sorted(by_length)}
    return figures
