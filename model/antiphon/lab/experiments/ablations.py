"""Experiments `ablations` and `depth`: one change at a time to a small translation model, on Multi30k English-German.

`ablations` is Vaswani et al. 2017, table 3, at small size. `depth` has the changes that only deep models show (Xiong et
al. 2020, "On Layer Normalization in the Transformer Architecture"): post-norm against pre-norm with 6 to 48 encoder
layers and a decoder of two, and training without warm-up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint
from antiphon.lab.accuracy import bleu_of, translations
from antiphon.lab.datasets import toy_language
from antiphon.lab.experiment import Claim, Experiment, Results, Setting
from antiphon.lab.report import Panel, Points, bars, curve_points, panels
from antiphon.lab.trial import Figures, Trial
from antiphon.training.corpus import load_corpus
from antiphon.training.recipe import DataConfig, Recipe, load_recipe

BASELINE = "baseline"
STEPS = 1200
_MODEL: dict[str, object] = dict(
    architecture="encoder-decoder", d_model=128, encoder_layers=2, decoder_layers=2, num_heads=4, d_ff=256, dropout=0.1,
    max_source_len=96, max_target_len=96,
)  # fmt: skip
_TRAIN: dict[str, object] = dict(
    batch_tokens=2048, warmup_steps=400, peak_lr=3e-3, label_smoothing=0.1, cooldown_steps=300, patience=1000,
    average_last=1,
)  # fmt: skip
_LINEAR: dict[str, object] = {"schedule": "linear", "cooldown_steps": 0}

Changes = Mapping[str, tuple[Mapping[str, object], Mapping[str, object]]]
"""For each setting the changed fields of model and training."""

CHANGES: Changes = {
    BASELINE: ({}, {}),
    **{f"heads {number}": ({"num_heads": number}, {}) for number in (1, 2, 8, 16, 32)},
    "no scale": ({"attention_scale": 1.0}, {}),
    "no residual": ({"residual": False}, {}),
    "no norm": ({"norm": "none"}, {}),
    "pre-norm": ({"norm_placement": "pre"}, {}),
    **{f"positions {kind}": ({"positions": kind}, {}) for kind in ("none", "learned", "t5_relative", "rope", "alibi")},
    "no warmup": ({}, {"warmup_steps": 1, **_LINEAR}),
    "warmup, linear": ({}, _LINEAR),
    "no label smoothing": ({}, {"label_smoothing": 0.0}),
}


def recipe_of(
    setting: Setting, name: str, seed: int, model: Mapping[str, object], train: Mapping[str, object], steps: int
) -> Recipe:
    """Return the recipe of a small translation model with these fields changed."""
    max_steps = setting.steps(steps)
    every = {"checkpoint_every_steps": max(12, max_steps // 12)}
    described = {
        "name": f"lab-{name.replace(' ', '-').replace(',', '')}",
        "vocab_size": 320 if setting.is_toy else 3000,
        "data": translation_data(setting).model_dump(),
        "model": {**_MODEL, **({"d_model": 32, "d_ff": 32} if setting.is_toy else {}), **model},
        "train": {**_TRAIN, **every, **train, "max_steps": max_steps, "seed": seed},
    }
    return Recipe.model_validate(described)


def translation_data(setting: Setting) -> DataConfig:
    """Return the data of Multi30k, at toy size those of an artificial language."""
    return toy_language(setting.made_data) if setting.is_toy else load_recipe("multi30k-en-de").data


def data_folder(setting: Setting) -> Path:
    """Return the folder of the files of `translation_data`."""
    return setting.made_data if setting.is_toy else setting.public_data()


def trials_of(setting: Setting, changes: Changes, steps: int) -> list[Trial]:
    """Return a trial for each change and seed."""
    return [
        Trial(name=name, recipe=recipe_of(setting, name, seed, *change, steps), data=data_folder(setting))
        for name, change in changes.items()
        for seed in setting.seeds
    ]


def measure(setting: Setting, trial: Trial, averaged: Path) -> Figures:
    """Return BLEU of greedy translations of the test part, and loss, entropies and gradient norm at the end."""
    return {"bleu": bleu_of_test_part(trial, load_checkpoint(averaged)), **last_record(averaged.parent)}


def bleu_of_test_part(trial: Trial, checkpoint: Checkpoint) -> float:
    """Return BLEU of greedy translations of the test part of a trial's data."""
    pairs = load_corpus(trial.pairs, trial.data).test
    is_tokenised = trial.pairs.preprocess == "moses-lower"
    answers = translations(checkpoint, [source for source, _ in pairs], max_new_tokens=64)
    return bleu_of(answers, pairs, is_tokenised=is_tokenised)


def last_record(run_folder: Path) -> Figures:
    """Return the last record of metrics.jsonl without times."""
    record = json.loads((run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return {name: value for name, value in record.items() if name not in ("time", "step", "epoch")}


def _ablation_claims(results: Results) -> Sequence[Claim]:
    def score(name: str) -> str:
        return results.shown(name, "bleu")

    def below(name: str, source: str, claim: str) -> Claim:
        against = f"BLEU {score(name)}, baseline {score(BASELINE)}"
        return Claim(source=source, claim=claim, measured=against, holds=results.is_better(BASELINE, name, "bleu"))

    table_3 = "Vaswani et al. 2017, table 3"
    entropy = "entropy_encoder_self"
    return [
        below("heads 1", f"{table_3} (A)", "One head is worse than several (0.9 BLEU there)."),
        below("heads 32", f"{table_3} (A)", "Too many heads are worse again (0.4 BLEU there)."),
        below("no scale", "Vaswani et al. 2017, 3.2.1", "Without 1/sqrt(d) the model learns less."),
        Claim(
            source="Vaswani et al. 2017, 3.2.1",
            claim="Without 1/sqrt(d) the softmax saturates: attention has lower entropy.",
            measured=f"{results.mean('no scale', entropy):.2f} nats, baseline {results.mean(BASELINE, entropy):.2f}",
            holds=results.is_above(BASELINE, "no scale", entropy),
        ),
        below("no residual", "He et al. 2016; Dong et al. 2021", "Without residual connections nothing is learned."),
        below("no norm", "Ba et al. 2016; Xiong et al. 2020", "Without norms training is worse."),
        below("positions none", "Vaswani et al. 2017, 3.5", "Without positions order is lost."),
        Claim(
            source=f"{table_3} (E)",
            claim="Learned positions are as good as sinusoids (0.1 BLEU there).",
            measured=f"BLEU {score('positions learned')}, baseline {score(BASELINE)}",
            holds=results.is_above("positions learned", BASELINE, "bleu") is None,
        ),
        below("no label smoothing", "Vaswani et al. 2017, 5.4", "Label smoothing improves BLEU."),
        Claim(
            source="Xiong et al. 2020",
            claim="Post-norm needs warm-up.",
            measured=f"BLEU {score('no warmup')} without, {score('warmup, linear')} with warm-up, same schedule",
            holds=results.is_better("warmup, linear", "no warmup", "bleu"),
        ),
    ]


ABLATIONS = Experiment(
    name="ablations",
    question="What does each part of the Transformer contribute? One change at a time to a small translation model.",
    trials=partial(trials_of, changes=CHANGES, steps=STEPS),
    measure=measure,
    columns={
        "bleu": ("BLEU", 1),
        "valid_loss": ("loss, nats", 3),
        "entropy_encoder_self": ("entropy of encoder, nats", 2),
        "entropy_decoder_cross": ("entropy of cross-attention, nats", 2),
        "gradient_norm": ("gradient norm", 2),
    },
    claims=_ablation_claims,
    draw=lambda results, target: bars(results, "bleu", "BLEU, test2016, greedy", target, marked=BASELINE),
)


_DEPTH_STEPS = 600
_DEPTHS = (6, 12, 24, 48)
_DEPTH_TRAIN: dict[str, object] = {"peak_lr": 3e-3, "warmup_steps": 150, "schedule": "linear", "cooldown_steps": 0}
_WIDTH: dict[str, object] = {"d_model": 64, "d_ff": 128}
_PLACEMENTS = ("post", "pre")
_NO_WARMUP = ", no warmup"
# Frequencies of tokens alone give 6.04 nats on the validation part of Multi30k with 3,000 tokens. A model above this
# limit has learned little more.
_UNLEARNED_NATS = 5.5


def _depth_changes(setting: Setting) -> Changes:
    def model(placement: str, depth: int) -> dict[str, object]:
        layers = 2 if setting.is_toy else depth
        return {"norm_placement": placement, "encoder_layers": layers, **_WIDTH}

    with_warmup = {
        f"{placement} {depth}": (model(placement, depth), _DEPTH_TRAIN)
        for depth in _DEPTHS
        for placement in _PLACEMENTS
    }
    without = {
        f"{placement} {depth}{_NO_WARMUP}": (model(placement, depth), {**_DEPTH_TRAIN, "warmup_steps": 1})
        for depth in (6, 12)
        for placement in _PLACEMENTS
    }
    return {**with_warmup, **without}


def _depth_trials(setting: Setting) -> list[Trial]:
    return trials_of(setting, _depth_changes(setting), _DEPTH_STEPS)


def _depth_figures(setting: Setting, trial: Trial, averaged: Path) -> Figures:
    return last_record(averaged.parent)


def _depth_claims(results: Results) -> Sequence[Claim]:
    def loss(name: str) -> str:
        return results.shown(name, "valid_loss", ".2f")

    def is_unlearned(name: str) -> bool:
        return results.has_diverged(name) or results.mean(name, "valid_loss") > _UNLEARNED_NATS

    return [
        Claim(
            source="Xiong et al. 2020; Wang et al. 2019",
            claim=f"With {depth} layers pre-norm trains better than post-norm.",
            measured=f"loss {loss(f'pre {depth}')} (pre), {loss(f'post {depth}')} (post)",
            holds=results.is_better(f"pre {depth}", f"post {depth}", "valid_loss", lower=True),
        )
        for depth in _DEPTHS
    ] + [
        Claim(
            source="Xiong et al. 2020, section 3",
            claim=f"Without warm-up post-norm with {depth} layers diverges or learns nothing; pre-norm learns.",
            measured=f"loss {loss(post)} (post), {loss(pre)} (pre); post with warm-up {loss(f'post {depth}')}",
            holds=is_unlearned(post) and not is_unlearned(pre),
        )
        for depth in (6, 12)
        for post, pre in [(f"post {depth}{_NO_WARMUP}", f"pre {depth}{_NO_WARMUP}")]
    ]


def _draw_depths(results: Results, target: Path) -> None:
    def by_depth(placement: str, ending: str) -> Points:
        names = {depth: f"{placement} {depth}{ending}" for depth in _DEPTHS}
        return {depth: results.values(name, "valid_loss") for depth, name in names.items() if name in results.trials}

    endings = ("", _NO_WARMUP)
    loss = "validation loss, nats per token"
    panels(
        [
            Panel(
                series={
                    f"{placement}{ending}": by_depth(placement, ending)
                    for ending in endings
                    for placement in _PLACEMENTS
                },
                labels=dict(xlabel="encoder layers", ylabel=loss, xscale="log"),
            ),
            Panel(
                series={
                    name: curve_points(results, name, "valid_loss")
                    for name in (f"{placement} 12{ending}" for ending in endings for placement in _PLACEMENTS)
                },
                labels=dict(xlabel="step", ylabel=loss),
            ),
        ],
        target,
    )


DEPTH = Experiment(
    name="depth",
    question="Why are deep Transformers normalised before each sublayer, and what does warm-up protect?",
    trials=_depth_trials,
    measure=_depth_figures,
    columns={
        "valid_loss": ("loss, nats", 3),
        "gradient_norm": ("gradient norm", 2),
        "max_gradient_norm": ("maximum", 1),
    },
    claims=_depth_claims,
    draw=_draw_depths,
)
