"""Experiment `heads`: pruning of 10 to 60 % of all heads by importance, with and without a short retraining.

Michel et al. 2019 and Voita et al. 2019. Heads are removed layer by layer as their importance says, and for comparison
as many in each module. Size and speed are those of the exported models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from antiphon.bundle.manifest import Bundle
from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, weights_of
from antiphon.client import Options
from antiphon.lab.costs import median_seconds
from antiphon.lab.experiment import Claim, Experiment, Results, Setting
from antiphon.lab.experiments.ablations import (
    CHANGES,
    STEPS,
    bleu_of_test_part,
    data_folder,
    translation_data,
    trials_of,
)
from antiphon.lab.report import curves
from antiphon.lab.served import exported, served_translations, serving
from antiphon.lab.trial import Figures, Trial
from antiphon.training.corpus import load_corpus
from antiphon.training.pruning import HeadsPerModule, Share, prune
from antiphon.training.task import Group
from antiphon.training.trainer import Trainer

_SETTING = "heads 8"
_SHARES = (10, 20, 30, 40, 50, 60)
_EVEN = {25: 6, 50: 4}
"""Share in percent, and heads of each module that remain of 8."""
_PAIRS = 500
_RETRAIN_STEPS = 200
_SENTENCES = 300  # of the measurement of speed
_RUNS = 3
_WHOLE = 0


def _measure(setting: Setting, trial: Trial, averaged: Path) -> Figures:
    """Return BLEU before pruning, and of every share before and after retraining."""
    whole = load_checkpoint(averaged)
    figures: Figures = {f"bleu {_WHOLE}": bleu_of_test_part(trial, whole)}
    choices = {f"{share}": Share(share / 100) for share in _SHARES} | {
        f"{share} even": HeadsPerModule(number) for share, number in _EVEN.items()
    }
    for name, choice in choices.items():
        pruned = _pruned(whole, choice, trial, averaged.parent / f"pruned-{name.replace(' ', '-')}")
        figures[f"bleu {name}"] = bleu_of_test_part(trial, pruned)
        figures[f"retrained {name}"] = bleu_of_test_part(trial, _retrained(trial, pruned))
    return figures


def _pruned(whole: Checkpoint, choice: Share | HeadsPerModule, trial: Trial, folder: Path) -> Checkpoint:
    pairs = load_corpus(trial.pairs, trial.data).valid[:_PAIRS]
    model = prune(whole, pairs, choice).model
    save_checkpoint(
        folder, config=model.config, weights=weights_of(model), tokenizer=whole.tokenizer, provenance=whole.provenance
    )
    return load_checkpoint(folder)


def _retrained(trial: Trial, pruned: Checkpoint) -> Checkpoint:
    """Train further for _RETRAIN_STEPS steps, with a learning rate that falls from a quarter of the peak."""
    train = trial.recipe.train
    steps = min(_RETRAIN_STEPS, train.max_steps)
    changed = train.model_copy(
        update=dict(
            max_steps=steps, warmup_steps=max(1, steps // 10), peak_lr=(train.peak_lr or 1e-3) / 4, schedule="linear",
            cooldown_steps=0, checkpoint_every_steps=steps,
        )
    )  # fmt: skip
    recipe = trial.recipe.model_copy(update={"train": changed})
    folder = pruned.text_folder.with_name(f"{pruned.text_folder.name}-retrained")
    averaged = Trainer(recipe, trial.data, folder, Group.join(), init=pruned).run()
    assert averaged is not None
    return load_checkpoint(averaged)


def _alone(setting: Setting, trained: Mapping[str, Path]) -> Figures:
    """Return parameters, size and speed of the exported models of the first seed."""
    data = translation_data(setting)
    pairs = load_corpus(data, data_folder(setting)).test[: 4 if setting.is_toy else _SENTENCES]
    shares = _SHARES[-1:] if setting.is_toy else _SHARES
    averaged = trained[_SETTING]
    folders = {f"{_WHOLE} %": averaged} | {f"{share} %": averaged.with_name(f"pruned-{share}") for share in shares}
    checkpoints = {name: load_checkpoint(folder) for name, folder in folders.items()}
    bundles = {
        name: exported(checkpoint, averaged.with_name(f"{name[:-2]}.bundle"), "int8")
        for name, checkpoint in checkpoints.items()
    }
    times = _seconds(bundles, [source for source, _ in pairs])
    figures = {
        name: {
            "parameters": checkpoints[name].model.num_parameters,
            "bundle, MB": sum(entry.size for entry in bundle.manifest.files.values()) / 1e6,
            "sentences/s": len(pairs) / times[name],
        }
        for name, bundle in bundles.items()
    }
    return {"exported in int8": figures}


def _seconds(bundles: Mapping[str, Bundle], sources: Sequence[str]) -> dict[str, float]:
    """Return the seconds that a server of each bundle takes to translate the sources, in alternating runs."""
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(bundle.path, "int8")) for name, bundle in bundles.items()}
        runs = {
            name: partial(served_translations, server.client, sources, Options(temperature=0))
            for name, server in servers.items()
        }
        return median_seconds(runs, _RUNS)


def _claims(results: Results) -> Sequence[Claim]:
    def score(figure: str) -> str:
        return results.shown(_SETTING, figure)

    def drop(figure: str) -> float:
        return results.mean(_SETTING, f"bleu {_WHOLE}") - results.mean(_SETTING, figure)

    return [
        Claim(
            source="Michel et al. 2019, section 4",
            claim="20 to 40 % of the heads can be removed without a noticeable loss.",
            measured=f"BLEU {score('bleu 0')} whole, {score('bleu 20')} without 20 %, {score('bleu 40')} without 40 %",
            holds=drop("bleu 20") < 0.5,
        ),
        Claim(
            source="Voita et al. 2019, section 6",
            claim="A model that is trained further after pruning loses little, even with half of its heads.",
            measured=f"BLEU without 50 %: {score('bleu 50')}, retrained {score('retrained 50')}",
            holds=drop("retrained 50") < 1.0,
        ),
        Claim(
            source="Michel et al. 2019, section 5",
            claim="Heads matter unevenly: removing the same number everywhere costs more.",
            measured=f"BLEU without 50 %: {score('bleu 50')} by importance, {score('bleu 50 even')} evenly",
            holds=results.mean(_SETTING, "bleu 50") > results.mean(_SETTING, "bleu 50 even"),
        ),
    ]


def _draw(results: Results, target: Path) -> None:
    def points(kind: str) -> Mapping[float, Sequence[float]]:
        whole = {float(_WHOLE): results.values(_SETTING, f"bleu {_WHOLE}")}
        return whole | {float(share): results.values(_SETTING, f"{kind} {share}") for share in _SHARES}

    series = {"pruned": points("bleu"), "pruned and retrained": points("retrained")}
    curves(series, target, xlabel="heads removed, %", ylabel="BLEU, test2016, greedy")


HEADS = Experiment(
    name="heads",
    question="How many attention heads can be removed from a trained model, and what is gained?",
    trials=partial(trials_of, changes={_SETTING: CHANGES[_SETTING]}, steps=STEPS),
    measure=_measure,
    columns={f"{kind} {share}": (f"{kind} {share} %", 1) for share in _SHARES for kind in ("bleu", "retrained")},
    claims=_claims,
    draw=_draw,
    alone=_alone,
)
