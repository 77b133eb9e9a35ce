"""Experiment `transfer`: what pre-training saves in labelled texts, for the encoder of recipe `bert-small`.

Devlin et al. 2019, section 5.3, and Howard and Ruder 2018, section 5. Each task is learned from 100, 1,000 and all of
its texts, with pre-trained and with random weights, of which the encoder is trained or frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from antiphon.lab.experiment import Claim, Experiment, Results
from antiphon.lab.experiments import compare
from antiphon.lab.experiments.compare import BERT, task_recipe
from antiphon.lab.measures.fine_tuned import fine_tune, score_of
from antiphon.lab.pictures import Panel, panels
from antiphon.lab.setting import Setting
from antiphon.lab.trial import Figures, Trial
from antiphon.training.recipe import PretrainRecipe, load_any_recipe

_PRETRAINING = "bert-small"
TASKS = ("snips", "clinc150", "sst2", "wnut17")
COUNTS = (100, 1000, None)
_STARTS = {
    "pre-trained": dict(keep_weights=True, frozen=False),
    "random": dict(keep_weights=False, frozen=False),
    "pre-trained, frozen": dict(keep_weights=True, frozen=True),
    "random, frozen": dict(keep_weights=False, frozen=True),
}
"""Starts of fine-tuning by the name of their figure."""


def _name(task: str, count: int | None) -> str:
    return f"{task} {'all' if count is None else count}"


def _rows(setting: Setting) -> dict[str, tuple[str, int | None]]:
    """Return task and number of labelled texts of each row; two rows at toy size."""
    tasks, counts = (TASKS[-2:], COUNTS[:1]) if setting.is_toy else (TASKS, COUNTS)
    return {_name(task, count): (task, count) for task in tasks for count in counts}


def _trials(setting: Setting) -> list[Trial]:
    """Return a trial for each row and seed; all rows of a seed share one pre-trained encoder."""
    pretrained = _toy_encoders(setting) if setting.is_toy else [_encoder(setting, seed) for seed in setting.seeds]
    return [
        replace(trial, name=name, tasks=(task_recipe(setting, task, trial.seed, count),))
        for name, (task, count) in _rows(setting).items()
        for trial in pretrained
    ]


def _toy_encoders(setting: Setting) -> list[Trial]:
    return [trial for trial in compare.trials(setting) if trial.name == BERT]


def _encoder(setting: Setting, seed: int) -> Trial:
    recipe = load_any_recipe(_PRETRAINING)
    assert isinstance(recipe, PretrainRecipe)
    steps = {name: setting.steps(getattr(recipe.train, name)) for name in ("max_steps", "warmup_steps")}
    train = recipe.train.model_copy(update=dict(seed=seed, **steps))
    return Trial(name=_PRETRAINING, recipe=recipe.model_copy(update=dict(train=train)), data=setting.public_data())


def _measure(_setting: Setting, trial: Trial, averaged: Path) -> Figures:
    """Return the score of each start in percent: accuracy, or F1 of entities."""
    (recipe,) = trial.tasks
    return {
        name: score_of(
            fine_tune(
                recipe.model_copy(update=dict(name=_slug(trial.name, name), freeze_encoder=start["frozen"])),
                trial.data,
                averaged,
                keep_weights=start["keep_weights"],
            )
        )
        for name, start in _STARTS.items()
    }


def _slug(row: str, start: str) -> str:
    return f"{row} {start}".replace(",", "").replace(" ", "-")


def _claims(results: Results) -> Sequence[Claim]:
    def wins(one: str, other: str, count: int | None, source: str, claim: str) -> list[Claim]:
        rows = [name for task in TASKS if (name := _name(task, count)) in results.trials]
        won = [results.mean(row, one) > results.mean(row, other) for row in rows]
        pairs = [f"{row.split()[0]} {results.mean(row, one):.1f} and {results.mean(row, other):.1f}" for row in rows]
        return [Claim(source=source, claim=claim, measured=", ".join(pairs), holds=all(won))] if rows else []

    devlin, howard = "Devlin et al. 2019, section 5", "Howard and Ruder 2018, section 5"
    whole, frozen = ("pre-trained", "random"), ("pre-trained, frozen", "random, frozen")
    return [
        *wins(*whole, 100, howard, "With 100 texts pre-training is better than random weights."),
        *wins(*whole, 1000, howard, "With 1,000 texts pre-training is better, too."),
        *wins(*whole, None, devlin, "With all texts pre-training is better, too."),
        *wins(*frozen, None, devlin, "A frozen pre-trained encoder is better than a frozen random one."),
    ]


def _draw(results: Results, target: Path) -> None:
    tasks = list(dict.fromkeys(name.split()[0] for name in results.trials))
    counts = list(dict.fromkeys(name.split()[1] for name in results.trials))
    axis = dict(xlabel="labelled texts", xticks=range(len(counts)), xticklabels=counts)

    def values(task: str, start: str) -> dict[float, list[float]]:
        rows = [name for name in results.trials if name.startswith(f"{task} ")]
        return {float(place): results.values(row, start) for place, row in enumerate(rows)}

    panels(
        [
            Panel(
                series={start: values(task, start) for start in _STARTS},
                labels=dict(title=task, ylabel="%", **axis),
            )
            for task in tasks
        ],
        target,
    )


TRANSFER = Experiment(
    name="transfer",
    question="How many labelled texts does pre-training replace?",
    trials=_trials,
    measure=_measure,
    columns={name: (f"{name}, %", 1) for name in _STARTS},
    claims=_claims,
    draw=_draw,
)
