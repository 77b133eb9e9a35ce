"""Experiments `compare` and `transfer`: kinds of encoders, and the labelled texts that pre-training saves.

`compare` pre-trains five kinds on the same number of tokens, and fine-tunes them on three tasks: BERT (Devlin et al.
2019), RoBERTa (Liu et al. 2019), ALBERT (Lan et al. 2020), DeBERTa (He et al. 2021), and DistilBERT (Sanh et al. 2019),
whose teacher is the BERT of the same seed. Apart from `_kind_changes` all recipes are the same. DeBERTa is without its
enhanced mask decoder here, so it has no absolute positions; ALBERT learns BERT's pairs.

`transfer` (Devlin et al. 2019, section 5.3; Howard and Ruder 2018, section 5) has the encoder of recipe `bert-small`.
Each task is learned from 100, 1,000 and all of its texts, with pre-trained and with random weights; the encoder is
trained or frozen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from antiphon.architecture.config import Disentangled
from antiphon.lab.accuracy import fine_tune, score_of
from antiphon.lab.datasets import toy_documents, toy_intents, toy_places
from antiphon.lab.experiment import Claim, Experiment, Results, Setting
from antiphon.lab.experiments.ablations import data_folder, last_record
from antiphon.lab.report import Panel, bars, panels
from antiphon.lab.served import GRAPH, PRECISION, SERVED, classifier_costs
from antiphon.lab.trial import Figures, Trial
from antiphon.training.corpus import read_labelled, read_parts
from antiphon.training.recipe import FineTuneRecipe, PretrainRecipe, load_any_recipe

BERT, STUDENT = "BERT", "DistilBERT"
TASKS = ("clinc150", "sst2", "wnut17")
MEAN = "mean"
_SERVED_TASK = TASKS[0]
_STEPS = 4000
_MODEL: dict[str, object] = {"d_model": 128, "encoder_layers": 4, "num_heads": 4, "d_ff": 512}
_TOY_MODEL: dict[str, object] = {"d_model": 32, "encoder_layers": 2, "num_heads": 4, "d_ff": 64, "max_source_len": 32}
_EXAMPLES = 4000  # labelled texts of each task
# Sentences of a text whose labels are asked for the measurement of speed: with one, most of the time is the request's.
_JOINED, _TOY_JOINED = 5, 1
_TEXTS, _TOY_TEXTS = 800, 8
_RUNS = 7

_NO_PAIRS: dict[str, object] = {"next_sentences": False}


def _kind_changes(layers: int) -> Mapping[str, Mapping[str, object]]:
    """Return the changed sections of the recipe of each kind; `layers` is their number in all but the student."""
    relative = Disentangled(span=128).model_dump()
    return {
        BERT: {"masking": {"copies": 10}},
        "RoBERTa": _NO_PAIRS,
        "ALBERT": {"model": {"share_layers": True, "embedding_width": 32}},
        "DeBERTa": {**_NO_PAIRS, "neighbour_start": False, "model": {"disentangled": relative, "positions": "none"}},
        STUDENT: {**_NO_PAIRS, "model": {"encoder_layers": layers // 2}, "distillation": {"temperature": 2.0}},
    }


def compare_trials(setting: Setting) -> list[Trial]:
    """Return a trial for each kind of encoder and seed."""
    shape = _TOY_MODEL if setting.is_toy else _MODEL
    layers = shape["encoder_layers"]
    assert isinstance(layers, int)
    trials: list[Trial] = []
    for seed in setting.seeds:
        teacher = None
        for name, changes in _kind_changes(layers).items():
            recipe = _recipe(setting, name, seed, shape, changes)
            trial = Trial(
                name=name,
                recipe=recipe,
                data=data_folder(setting),
                teacher=teacher if name == STUDENT else None,
                tasks=tuple(task_recipe(setting, task, seed, _EXAMPLES) for task in TASKS),
            )
            teacher = trial if name == BERT else teacher
            trials.append(trial)
    return trials


def _recipe(
    setting: Setting, name: str, seed: int, shape: Mapping[str, object], changes: Mapping[str, object]
) -> PretrainRecipe:
    base = load_any_recipe("bert-small").model_dump(exclude_defaults=True)
    steps = setting.steps(_STEPS)
    changed_model = changes.get("model", {})
    assert isinstance(changed_model, dict)
    train = dict(
        max_steps=steps, warmup_steps=max(1, steps // 10), checkpoint_every_steps=max(12, steps // 8), seed=seed
    )
    described = {
        **base,
        **changes,
        "name": f"lab-compare-{name.lower()}",
        "model": {**base["model"], **shape, **changed_model},
        "train": {**base["train"], **train},
    }
    if setting.is_toy:
        described |= {"data": toy_documents(setting.made_data).model_dump(), "vocab_size": 320}
    return PretrainRecipe.model_validate(described)


def task_recipe(setting: Setting, name: str, seed: int, max_train_examples: int | None) -> FineTuneRecipe:
    """Return the recipe of a task that learns from at most that many texts; at toy size with artificial data."""
    recipe = load_any_recipe(name)
    assert isinstance(recipe, FineTuneRecipe)
    data, train = recipe.data, recipe.train.model_copy(update={"seed": seed})
    if setting.is_toy:
        data = toy_places(setting.made_data) if recipe.task == "tag" else toy_intents(setting.made_data)
        train = train.model_copy(update=dict(max_steps=12, min_steps=0, checkpoint_every_steps=12, warmup_steps=2))
    data = data.model_copy(update={"max_train_examples": max_train_examples})
    return recipe.model_copy(update={"data": data, "train": train})


def _compare_figures(_setting: Setting, trial: Trial, averaged: Path) -> Figures:
    """Return the score of each task after fine-tuning, their mean, and the accuracy of pre-training."""
    scores = {
        name: score_of(fine_tune(task, trial.data, averaged)) for name, task in zip(TASKS, trial.tasks, strict=True)
    }
    masked = 100 * last_record(averaged.parent)["fill_mask_accuracy"]
    return {**scores, MEAN: sum(scores.values()) / len(scores), "masked tokens": masked}


def _classifier_costs(setting: Setting, trained: Mapping[str, Path]) -> Figures:
    """Return parameters, size, memory and speed of the exported classifiers of the first seed."""
    recipe = task_recipe(setting, _SERVED_TASK, setting.seeds[0], _EXAMPLES)
    folders = {name: fine_tune(recipe, data_folder(setting), averaged) for name, averaged in trained.items()}
    title = f"{_SERVED_TASK}, exported in {PRECISION}, one thread; texts of {_JOINED} sentences"
    return {title: classifier_costs(folders, _texts(setting), _RUNS)}


def _texts(setting: Setting) -> list[str]:
    """Return the texts of the measurement of speed: sentences of the served task's test part."""
    data = task_recipe(setting, _SERVED_TASK, setting.seeds[0], None).data
    count, joined = (_TOY_TEXTS, _TOY_JOINED) if setting.is_toy else (_TEXTS, _JOINED)
    sentences = [item.text for item in read_parts(data_folder(setting), data, read_labelled)["test"]]
    return [" ".join(sentences[start : start + joined]) for start in range(0, count * joined, joined)]


def _compare_claims(results: Results) -> Sequence[Claim]:
    def better(name: str, reference: str, source: str, claim: str) -> Claim:
        measured = ", ".join(f"{name} {results.shown(name, MEAN)}" for name in (name, reference))
        return Claim(source=source, claim=claim, measured=measured, holds=results.is_above(name, reference, MEAN))

    (rows,) = results.alone.values()
    kept = results.mean(STUDENT, MEAN) / results.mean(BERT, MEAN)
    served, graph = (rows[STUDENT][speed] / rows[BERT][speed] for speed in (SERVED, GRAPH))
    return [
        better("RoBERTa", BERT, "Liu et al. 2019, section 4", "New masks and no pairs are better than BERT's recipe."),
        better("DeBERTa", "RoBERTa", "He et al. 2021, section 5", "Disentangled attention is better."),
        better(BERT, "ALBERT", "Lan et al. 2020, table 4", "Shared layers of the same width cost accuracy."),
        Claim(
            source="Sanh et al. 2019, section 3",
            claim="A student with half of the layers keeps 97 % of the scores, and is 1.6 times as fast.",
            measured=f"{100 * kept:.1f} % of the scores; graph {graph:.2f} times as fast, served {served:.2f}",
            holds=kept >= 0.97 and graph >= 1.6,
        ),
    ]


COMPARE = Experiment(
    name="compare",
    question="What do RoBERTa, ALBERT, DeBERTa and DistilBERT change, at the same number of training tokens as BERT?",
    trials=compare_trials,
    measure=_compare_figures,
    columns={
        "clinc150": ("clinc150, accuracy, %", 1),
        "sst2": ("sst2, accuracy, %", 1),
        "wnut17": ("wnut17, F1, %", 1),
        MEAN: ("mean", 1),
        "masked tokens": ("masked tokens, %", 1),
    },
    claims=_compare_claims,
    draw=lambda results, target: bars(results, MEAN, "mean of three tasks, %", target, marked=BERT),
    alone=_classifier_costs,
)


_PRETRAINING = "bert-small"
TRANSFER_TASKS = ("snips", "clinc150", "sst2", "wnut17")
COUNTS = (100, 1000, None)
_STARTS = {
    "pre-trained": dict(keep_weights=True, frozen=False),
    "random": dict(keep_weights=False, frozen=False),
    "pre-trained, frozen": dict(keep_weights=True, frozen=True),
    "random, frozen": dict(keep_weights=False, frozen=True),
}
"""Starts of fine-tuning by the name of their figure."""


def _row_name(task: str, count: int | None) -> str:
    return f"{task} {'all' if count is None else count}"


def _rows(setting: Setting) -> dict[str, tuple[str, int | None]]:
    """Return task and number of labelled texts of each row; two rows at toy size."""
    tasks, counts = (TRANSFER_TASKS[-2:], COUNTS[:1]) if setting.is_toy else (TRANSFER_TASKS, COUNTS)
    return {_row_name(task, count): (task, count) for task in tasks for count in counts}


def _transfer_trials(setting: Setting) -> list[Trial]:
    """Return a trial for each row and seed; all rows of a seed share one pre-trained encoder."""
    pretrained = _toy_encoders(setting) if setting.is_toy else [_encoder(setting, seed) for seed in setting.seeds]
    return [
        replace(trial, name=name, tasks=(task_recipe(setting, task, trial.seed, count),))
        for name, (task, count) in _rows(setting).items()
        for trial in pretrained
    ]


def _toy_encoders(setting: Setting) -> list[Trial]:
    return [trial for trial in compare_trials(setting) if trial.name == BERT]


def _encoder(setting: Setting, seed: int) -> Trial:
    recipe = load_any_recipe(_PRETRAINING)
    assert isinstance(recipe, PretrainRecipe)
    steps = {name: setting.steps(getattr(recipe.train, name)) for name in ("max_steps", "warmup_steps")}
    train = recipe.train.model_copy(update=dict(seed=seed, **steps))
    return Trial(name=_PRETRAINING, recipe=recipe.model_copy(update=dict(train=train)), data=setting.public_data())


def _transfer_figures(_setting: Setting, trial: Trial, averaged: Path) -> Figures:
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


def _transfer_claims(results: Results) -> Sequence[Claim]:
    def wins(start: str, reference: str, count: int | None, source: str, claim: str) -> list[Claim]:
        rows = [name for task in TRANSFER_TASKS if (name := _row_name(task, count)) in results.trials]
        won = [results.mean(row, start) > results.mean(row, reference) for row in rows]
        pairs = [
            f"{row.split()[0]} {results.mean(row, start):.1f} and {results.mean(row, reference):.1f}" for row in rows
        ]
        return [Claim(source=source, claim=claim, measured=", ".join(pairs), holds=all(won))] if rows else []

    devlin, howard = "Devlin et al. 2019, section 5", "Howard and Ruder 2018, section 5"
    whole, frozen = ("pre-trained", "random"), ("pre-trained, frozen", "random, frozen")
    return [
        *wins(*whole, 100, howard, "With 100 texts pre-training is better than random weights."),
        *wins(*whole, 1000, howard, "With 1,000 texts pre-training is better, too."),
        *wins(*whole, None, devlin, "With all texts pre-training is better, too."),
        *wins(*frozen, None, devlin, "A frozen pre-trained encoder is better than a frozen random one."),
    ]


def _draw_transfer(results: Results, target: Path) -> None:
    tasks = list(dict.fromkeys(name.split()[0] for name in results.trials))
    counts = list(dict.fromkeys(name.split()[1] for name in results.trials))
    axis = dict(xlabel="labelled texts", xticks=range(len(counts)), xticklabels=counts)

    def values(task: str, start: str) -> dict[float, list[float]]:
        rows = [name for name in results.trials if name.startswith(f"{task} ")]
        return {float(place): results.values(row, start) for place, row in enumerate(rows)}

    panels(
        [
            Panel(series={start: values(task, start) for start in _STARTS}, labels=dict(title=task, ylabel="%", **axis))
            for task in tasks
        ],
        target,
    )


TRANSFER = Experiment(
    name="transfer",
    question="How many labelled texts does pre-training replace?",
    trials=_transfer_trials,
    measure=_transfer_figures,
    columns={name: (f"{name}, %", 1) for name in _STARTS},
    claims=_transfer_claims,
    draw=_draw_transfer,
)
