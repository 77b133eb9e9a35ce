"""Experiment `ablations`: one change at a time to a small translation model, on Multi30k English-German.

Vaswani et al. 2017, table 3, at small size. Experiment `depth` has the changes that only deep models show.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint
from antiphon.lab.data.toy_language import toy_language
from antiphon.lab.experiment import Claim, Experiment, Results
from antiphon.lab.measures.translations import bleu_of, translations
from antiphon.lab.pictures import bars
from antiphon.lab.setting import Setting
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
    batch_tokens=2048,
    warmup_steps=400,
    peak_lr=3e-3,
    label_smoothing=0.1,
    cooldown_steps=300,
    patience=1000,
    average_last=1,
)

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
    described = {
        "name": f"lab-{name.replace(' ', '-').replace(',', '')}",
        "vocab_size": 320 if setting.is_toy else 3000,
        "data": translation_data(setting).model_dump(),
        "model": {**_MODEL, **({"d_model": 32, "d_ff": 32} if setting.is_toy else {}), **model},
        "train": {
            **_TRAIN,
            "checkpoint_every_steps": max(12, max_steps // 12),
            **train,
            "max_steps": max_steps,
            "seed": seed,
        },
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


def _trials(setting: Setting) -> list[Trial]:
    return trials_of(setting, CHANGES, STEPS)


def _claims(results: Results) -> Sequence[Claim]:
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


def _draw(results: Results, target: Path) -> None:
    bars(results, "bleu", "BLEU, test2016, greedy", target, marked=BASELINE)


ABLATIONS = Experiment(
    name="ablations",
    question="What does each part of the Transformer contribute? One change at a time to a small translation model.",
    trials=_trials,
    measure=measure,
    columns={
        "bleu": ("BLEU", 1),
        "valid_loss": ("loss, nats", 3),
        "entropy_encoder_self": ("entropy of encoder, nats", 2),
        "entropy_decoder_cross": ("entropy of cross-attention, nats", 2),
        "gradient_norm": ("gradient norm", 2),
    },
    claims=_claims,
    draw=_draw,
)
