"""Experiment `algorithms`: six algorithmic tasks within and beyond the training lengths, for both sequence models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from antiphon.lab.data.algorithms import ALGORITHMS, TOY_SIZES, Algorithm, Sizes, algorithm_dataset
from antiphon.lab.experiment import Claim, Experiment, Results
from antiphon.lab.experiments.sequences import MODELS, exact_figures, trials_on
from antiphon.lab.pictures import curves
from antiphon.lab.setting import Setting
from antiphon.lab.trial import Figures, Trial

_STEPS = {"transformer": 2000, "lstm": 1200}
_IN_RANGE = "in range"


def sizes_of(setting: Setting) -> Sizes:
    """Return the sizes of the tasks."""
    return TOY_SIZES if setting.is_toy else Sizes()


def trials(setting: Setting) -> list[Trial]:
    """Return the trials of both models on every task; on two of them at toy size."""
    longest = sizes_of(setting).longest_tokens
    found: list[Trial] = []
    for task in ALGORITHMS[:2] if setting.is_toy else ALGORITHMS:
        dataset = algorithm_dataset(task, setting.made_data, sizes_of(setting))
        found += trials_on(setting, task, dataset, (longest, longest), _STEPS)
    return found


def _measure(setting: Setting, trial: Trial, averaged: Path) -> Figures:
    """Return exact match in range, and at factors of the longest training length."""
    task: Algorithm = next(task for task in ALGORITHMS if trial.name.startswith(task))
    sizes = sizes_of(setting)
    dataset = algorithm_dataset(task, setting.made_data, sizes)
    tests = {_renamed(name, sizes): pairs for name, pairs in dataset.tests.items() if pairs}
    return exact_figures(trial, averaged, tests)


def _renamed(name: str, sizes: Sizes) -> str:
    return name if name == _IN_RANGE else f"{int(name.split()[1]) / sizes.max_len:g} times"


def _claims(results: Results) -> Sequence[Claim]:
    def accuracy(name: str, part: str) -> str:
        return f"{name} {results.shown(name, part)} %"

    found = [
        Claim(
            source="this project",
            claim=f"Both models learn to {task} within the training lengths: at least 99 %.",
            measured=", ".join(accuracy(f"{task} {model}", _IN_RANGE) for model in MODELS),
            holds=all(results.mean(f"{task} {model}", _IN_RANGE) >= 99 for model in MODELS),
        )
        for task in ("copy", "reverse")
    ]
    best = max(results.trials, key=lambda name: results.mean(name, "2 times"))
    found.append(
        Claim(
            source="Kazemnejad et al. 2023; Lake and Baroni 2018",
            claim="What is learned within the training lengths fails at twice the length.",
            measured=f"best of all tasks: {accuracy(best, '2 times')}",
            holds=results.mean(best, "2 times") < 50,
        )
    )
    return found


def _draw(results: Results, target: Path) -> None:
    parts: Mapping[str, float] = {_IN_RANGE: 1.0, "1.5 times": 1.5, "2 times": 2.0, "3 times": 3.0, "4 times": 4.0}
    series = {
        name: {place: results.values(name, part) for part, place in parts.items() if results.values(name, part)}
        for name in results.trials
    }
    curves(series, target, xlabel="length / longest training length (1: in range)", ylabel="exact match, %")


ALGORITHMIC = Experiment(
    name="algorithms",
    question="Which algorithms do attention and recurrence learn, and do they still work on longer inputs?",
    trials=trials,
    measure=_measure,
    columns={part: (f"{part}, %", 1) for part in (_IN_RANGE, "1.5 times", "2 times", "4 times")},
    claims=_claims,
    draw=_draw,
)
