"""Experiment `heads`: pruning of 10 to 60 % of all heads by importance, with and without a short retraining.

Michel et al. 2019 and Voita et al. 2019. Heads are removed layer by layer as their importance says, and for comparison
as many in each module. Size and speed are those of the exported models.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from antiphon.model.checkpoints.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, weights_of
from antiphon.model.export.export import export_bundle
from antiphon.model.lab.experiment import Claim, Experiment, Results
from antiphon.model.lab.experiments.ablations import CHANGES, STEPS, data_folder, test_bleu, translation_data, trials_of
from antiphon.model.lab.measures.served import served
from antiphon.model.lab.pictures import curves
from antiphon.model.lab.setting import Setting
from antiphon.model.lab.trial import Figures, Trial
from antiphon.model.training.data.corpus import load_corpus
from antiphon.model.training.group import Group
from antiphon.model.training.pruning.head_choice import Each, Share
from antiphon.model.training.pruning.prune import prune
from antiphon.model.training.train import Trainer

_SETTING = "heads 8"
_SHARES = (10, 20, 30, 40, 50, 60)
_EVEN = {25: 6, 50: 4}
"""Share in percent, and heads of each module that remain of 8."""
_PAIRS = 500
_RETRAIN_STEPS = 200
_SPOKEN = 300  # sentences of the measurement of speed
_WHOLE = 0


def _trials(setting: Setting) -> list[Trial]:
    return trials_of(setting, {_SETTING: CHANGES[_SETTING]}, STEPS)


def _measure(setting: Setting, trial: Trial, averaged: Path) -> Figures:
    """Return BLEU before pruning, and of every share before and after retraining."""
    whole = load_checkpoint(averaged)
    figures: Figures = {f"bleu {_WHOLE}": test_bleu(trial, whole)}
    choices = {f"{share}": Share(share / 100) for share in _SHARES} | {
        f"{share} even": Each(number) for share, number in _EVEN.items()
    }
    for name, choice in choices.items():
        pruned = _pruned(whole, choice, trial, averaged.parent / f"pruned-{name.replace(' ', '-')}")
        figures[f"bleu {name}"] = test_bleu(trial, pruned)
        figures[f"retrained {name}"] = test_bleu(trial, _retrained(trial, pruned))
    return figures


def _pruned(whole: Checkpoint, choice: Share | Each, trial: Trial, folder: Path) -> Checkpoint:
    pairs = load_corpus(trial.recipe.data, trial.data).valid[:_PAIRS]
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
    pairs = load_corpus(data, data_folder(setting)).test[: 4 if setting.is_toy else _SPOKEN]
    averaged = trained[_SETTING]
    shares = _SHARES[-1:] if setting.is_toy else _SHARES
    folders = {f"{_WHOLE} %": averaged} | {f"{share} %": averaged.with_name(f"pruned-{share}") for share in shares}
    return {"exported in int8": {name: _exported(path, [s for s, _ in pairs]) for name, path in folders.items()}}


def _exported(path: Path, sources: Sequence[str]) -> Figures:
    checkpoint = load_checkpoint(path)
    bundle = export_bundle(
        checkpoint, path.with_name(f"{path.name}.bundle"), precisions=("int8",), explain=False, overwrite=True
    )
    with served(bundle.path, precision="int8") as client:
        list(client.generate_many(sources[:8], concurrency=8))  # not measured: first calls
        started_s = time.perf_counter()
        list(client.generate_many(sources, concurrency=16))
        took_s = time.perf_counter() - started_s
    size = sum(entry.size for entry in bundle.manifest.files.values())
    return {
        "parameters": checkpoint.model.num_parameters,
        "bundle, MB": size / 1e6,
        "sentences/s": len(sources) / took_s,
    }


def _claims(results: Results) -> Sequence[Claim]:
    def score(figure: str) -> str:
        return f"{results.mean(_SETTING, figure):.1f} ± {results.deviation(_SETTING, figure):.1f}"

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
    trials=_trials,
    measure=_measure,
    columns={f"{kind} {share}": (f"{kind} {share} %", 1) for share in _SHARES for kind in ("bleu", "retrained")},
    claims=_claims,
    draw=_draw,
    alone=_alone,
)
