"""Experiment `compare`: five kinds of encoders, pre-trained on the same number of tokens and fine-tuned on three tasks.

BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019), ALBERT (Lan et al. 2020), DeBERTa (He et al. 2021), and DistilBERT
(Sanh et al. 2019), whose teacher is the BERT of the same seed. Apart from `_changes` all recipes are the same. DeBERTa
is without its enhanced mask decoder here, so it has no absolute positions; ALBERT learns BERT's pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from antiphon.architecture.config import Disentangled
from antiphon.lab.data.toy_texts import toy_documents, toy_intents, toy_places
from antiphon.lab.experiment import Claim, Experiment, Results
from antiphon.lab.experiments.ablations import data_folder, last_record
from antiphon.lab.measures.classifiers import GRAPH, PRECISION, SERVED, classifier_costs
from antiphon.lab.measures.fine_tuned import fine_tune, score_of
from antiphon.lab.pictures import bars
from antiphon.lab.setting import Setting
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


def _changes(layers: int) -> Mapping[str, Mapping[str, object]]:
    """Return the changed sections of the recipe of each kind; `layers` is their number in all but the student."""
    relative = Disentangled(span=128).model_dump()
    return {
        BERT: {"masking": {"copies": 10}},
        "RoBERTa": _NO_PAIRS,
        "ALBERT": {"model": {"share_layers": True, "embedding_width": 32}},
        "DeBERTa": {**_NO_PAIRS, "neighbour_start": False, "model": {"disentangled": relative, "positions": "none"}},
        STUDENT: {**_NO_PAIRS, "model": {"encoder_layers": layers // 2}, "distillation": {"temperature": 2.0}},
    }


def trials(setting: Setting) -> list[Trial]:
    """Return a trial for each kind of encoder and seed."""
    shape = _TOY_MODEL if setting.is_toy else _MODEL
    layers = shape["encoder_layers"]
    assert isinstance(layers, int)
    found: list[Trial] = []
    for seed in setting.seeds:
        teacher = None
        for name, changes in _changes(layers).items():
            recipe = _recipe(setting, name, seed, shape, changes)
            trial = Trial(
                name=name,
                recipe=recipe,
                data=data_folder(setting),
                teacher=teacher if name == STUDENT else None,
                tasks=tuple(task_recipe(setting, task, seed, _EXAMPLES) for task in TASKS),
            )
            teacher = trial if name == BERT else teacher
            found.append(trial)
    return found


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


def _measure(_setting: Setting, trial: Trial, averaged: Path) -> Figures:
    """Return the score of each task after fine-tuning, their mean, and the accuracy of pre-training."""
    scores = {
        name: score_of(fine_tune(task, trial.data, averaged)) for name, task in zip(TASKS, trial.tasks, strict=True)
    }
    masked = 100 * last_record(averaged.parent)["fill_mask_accuracy"]
    return {**scores, MEAN: sum(scores.values()) / len(scores), "masked tokens": masked}


def _alone(setting: Setting, trained: Mapping[str, Path]) -> Figures:
    """Return parameters, size, memory and speed of the exported classifiers of the first seed."""
    recipe = task_recipe(setting, _SERVED_TASK, setting.seeds[0], _EXAMPLES)
    folders = {name: fine_tune(recipe, data_folder(setting), averaged) for name, averaged in trained.items()}
    title = f"{_SERVED_TASK}, exported in {PRECISION}, one thread; texts of {_JOINED} sentences"
    return {title: classifier_costs(folders, _texts(setting), _RUNS)}


def _texts(setting: Setting) -> list[str]:
    """Return the texts of the measurement of speed: sentences of the served task's test part."""
    data = task_recipe(setting, _SERVED_TASK, setting.seeds[0], None).data
    count, joined = (_TOY_TEXTS, _TOY_JOINED) if setting.is_toy else (_TEXTS, _JOINED)
    sentences = [item.text for item in read_parts(data_folder(setting), data, read_labelled).test]
    return [" ".join(sentences[start : start + joined]) for start in range(0, count * joined, joined)]


def _claims(results: Results) -> Sequence[Claim]:
    def better(one: str, other: str, source: str, claim: str) -> Claim:
        measured = ", ".join(f"{name} {results.shown(name, MEAN)}" for name in (one, other))
        return Claim(source=source, claim=claim, measured=measured, holds=results.is_above(one, other, MEAN))

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


def _draw(results: Results, target: Path) -> None:
    bars(results, MEAN, "mean of three tasks, %", target, marked=BERT)


COMPARE = Experiment(
    name="compare",
    question="What do RoBERTa, ALBERT, DeBERTa and DistilBERT change, at the same number of training tokens as BERT?",
    trials=trials,
    measure=_measure,
    columns={
        "clinc150": ("clinc150, accuracy, %", 1),
        "sst2": ("sst2, accuracy, %", 1),
        "wnut17": ("wnut17, F1, %", 1),
        MEAN: ("mean", 1),
        "masked tokens": ("masked tokens, %", 1),
    },
    claims=_claims,
    draw=_draw,
    alone=_alone,
)
