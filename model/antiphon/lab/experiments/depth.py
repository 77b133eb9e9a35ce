"""Experiment `depth`: post-norm against pre-norm with 6 to 48 encoder layers, and training without warm-up.

Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture". The decoder has two layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from antiphon.lab.experiment import Claim, Experiment, Results
from antiphon.lab.experiments.ablations import Changes, last_record, trials_of
from antiphon.lab.pictures import Panel, Points, curve_points, panels
from antiphon.lab.setting import Setting
from antiphon.lab.trial import Figures, Trial

_STEPS = 600
_DEPTHS = (6, 12, 24, 48)
_TRAIN: dict[str, object] = {"peak_lr": 3e-3, "warmup_steps": 150, "schedule": "linear", "cooldown_steps": 0}
_WIDTH: dict[str, object] = {"d_model": 64, "d_ff": 128}
_PLACEMENTS = ("post", "pre")
_NO_WARMUP = ", no warmup"
# Frequencies of tokens alone give 6.04 nats on the validation part of Multi30k with 3,000 tokens. A model above this
# limit has learned little more.
_UNLEARNED_NATS = 5.5


def _changes(setting: Setting) -> Changes:
    def model(placement: str, depth: int) -> dict[str, object]:
        layers = 2 if setting.is_toy else depth
        return {"norm_placement": placement, "encoder_layers": layers, **_WIDTH}

    with_warmup = {
        f"{placement} {depth}": (model(placement, depth), _TRAIN) for depth in _DEPTHS for placement in _PLACEMENTS
    }
    without = {
        f"{placement} {depth}{_NO_WARMUP}": (model(placement, depth), {**_TRAIN, "warmup_steps": 1})
        for depth in (6, 12)
        for placement in _PLACEMENTS
    }
    return {**with_warmup, **without}


def _trials(setting: Setting) -> list[Trial]:
    return trials_of(setting, _changes(setting), _STEPS)


def _measure(setting: Setting, trial: Trial, averaged: Path) -> Figures:
    return last_record(averaged.parent)


def _claims(results: Results) -> Sequence[Claim]:
    def loss(name: str) -> str:
        return results.shown(name, "valid_loss", ".2f")

    def is_unlearned(name: str) -> bool:
        return results.has_diverged(name) or results.mean(name, "valid_loss") > _UNLEARNED_NATS

    found = [
        Claim(
            source="Xiong et al. 2020; Wang et al. 2019",
            claim=f"With {depth} layers pre-norm trains better than post-norm.",
            measured=f"loss {loss(f'pre {depth}')} (pre), {loss(f'post {depth}')} (post)",
            holds=results.is_better(f"pre {depth}", f"post {depth}", "valid_loss", lower=True),
        )
        for depth in _DEPTHS
    ]
    for depth in (6, 12):
        name = f"post {depth}{_NO_WARMUP}"
        pre = f"pre {depth}{_NO_WARMUP}"
        found.append(
            Claim(
                source="Xiong et al. 2020, section 3",
                claim=f"Without warm-up post-norm with {depth} layers diverges or learns nothing; pre-norm learns.",
                measured=f"loss {loss(name)} (post), {loss(pre)} (pre); post with warm-up {loss(f'post {depth}')}",
                holds=is_unlearned(name) and not is_unlearned(pre),
            )
        )
    return found


def _draw(results: Results, target: Path) -> None:
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
    trials=_trials,
    measure=_measure,
    columns={
        "valid_loss": ("loss, nats", 3),
        "gradient_norm": ("gradient norm", 2),
        "max_gradient_norm": ("maximum", 1),
    },
    claims=_claims,
    draw=_draw,
)
