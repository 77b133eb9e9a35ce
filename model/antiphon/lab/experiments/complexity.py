"""Experiment `complexity`: attention against recurrence, measured instead of copied (Vaswani et al. 2017, table 1).

Single layers show the growth with T. Whole models add what table 1 leaves out: the additive attention of the LSTM. The
gradient at large distances is that of whole models: untrained, and trained on `reverse`, whose last output is the first
input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from antiphon.lab.costs import LAYERS, WIDTH, crossing, growth, layer_costs, layer_paths
from antiphon.lab.datasets import Algorithm, algorithm_dataset
from antiphon.lab.experiment import Claim, Experiment, Results, Setting
from antiphon.lab.experiments.sequences import algorithm_trials, model_of, sizes_of
from antiphon.lab.report import Panel, Points, panels
from antiphon.lab.sequence_models import (
    LOSSES,
    TRAINING,
    SequenceModel,
    gradient_by_distance,
    load_sequence_model,
    speeds,
    step_costs,
)
from antiphon.lab.trial import Figures, Trial
from antiphon.training.corpus import Pair

_TASK: Algorithm = "reverse"
_LENGTHS, _TOY_LENGTHS = (64, 128, 256, 512, 1024, 2048), (8, 16)
_STEPWISE_LENGTHS = (16, 32, 64, 128)
_MODEL_LENGTHS = (32, 64, 128, 256, 512, 1024)  # at 1,024 a step of the LSTM holds 0.56 GB, nearly all of it T^2
_RUNS = 5
_ROWS = 64
_LAYERS = f"one layer of width {WIDTH}: Mflop forward; peak MB and ms forward and backward"
_PATHS = "one layer: operations in sequence and distances"
_MODELS = "one training step of whole models, one row: peak MB beside weights, and ms"
_SPEED = "trained models, rows of the longest training length"
_KINDS = {_LAYERS: "layer", _PATHS: "layer", _MODELS: "model"}


def _trials(setting: Setting) -> list[Trial]:
    return [trial for trial in algorithm_trials(setting) if trial.name.startswith(_TASK)]


def _pairs(setting: Setting) -> list[Pair]:
    """Return test examples of the longest training length."""
    sizes = sizes_of(setting)
    dataset = algorithm_dataset(_TASK, setting.made_data, sizes)
    return [pair for pair in dataset.tests["in range"] if len(pair[0].split()) == sizes.max_len][:_ROWS]


def _measure(setting: Setting, trial: Trial, averaged: Path) -> Figures:
    """Return norms of the gradient by distance, at the start and after training."""
    model = load_sequence_model(averaged, model_of(trial))
    batch = model.batch(_pairs(setting))

    def gradient(of: SequenceModel) -> list[float]:
        return gradient_by_distance(of.loss, of.source_embedding, batch)

    untrained, trained = gradient(model.untrained(trial.seed)), gradient(model)
    return {
        "far over near": untrained[-1] / untrained[0],
        "share of the right token": 100 * trained[-1] / sum(trained),
        "untrained": untrained,
        "trained": trained,
    }


def _alone(setting: Setting, trained: Mapping[str, Path]) -> Figures:
    torch.set_num_threads(1)
    layer, stepwise, whole = [_TOY_LENGTHS] * 3 if setting.is_toy else [_LENGTHS, _STEPWISE_LENGTHS, _MODEL_LENGTHS]
    models = {name: load_sequence_model(averaged, name.rpartition(" ")[2]) for name, averaged in trained.items()}
    return {
        _LAYERS: {str(length): layer_costs(length, _RUNS) for length in layer},
        _PATHS: {str(length): layer_paths(length) for length in stepwise},
        _MODELS: {str(length): step_costs(length, _RUNS) for length in whole},
        _SPEED: speeds(models, _pairs(setting), _RUNS),
    }


def _claims(results: Results) -> Sequence[Claim]:
    return [*_growth_claims(results.alone), _crossing_claim(results.alone[_LAYERS]), *_model_claims(results)]


def _growth_claims(alone: Figures) -> list[Claim]:
    def grows(faster: tuple[str, str], slower: tuple[str, str], unit: str, claim: str, source: str) -> Claim:
        (high, steeper), (low, flatter) = (
            (name, growth(alone[at], f"{name}, {unit}")) for at, name in (faster, slower)
        )
        measured = f"{high} T^{steeper:z.2f} ({_KINDS[faster[0]]}), {low} T^{flatter:z.2f} ({_KINDS[slower[0]]})"
        return Claim(source=source, claim=claim, measured=measured, holds=steeper > flatter + 0.3)

    table = "Vaswani et al. 2017, table 1"
    eager, sdpa, layer = ((_LAYERS, name) for name in LAYERS)
    recurrent, constant = (_PATHS, "LSTM"), (_PATHS, "attention")
    whole = (_MODELS, "LSTM")
    return [
        grows(eager, layer, "Mflop", "Operations of a layer: T^2 d against T d^2.", table),
        grows(eager, layer, "ms", "So the time of attention grows faster with T.", table),
        grows(eager, layer, "MB", "So does its memory, if the weights are stored.", table),
        grows(eager, sdpa, "MB", "Attention in blocks needs memory T, not T^2.", "Rabe and Staats 2021"),
        grows(recurrent, constant, "in sequence", "Operations in sequence: T against 1.", table),
        grows(recurrent, constant, "first to last", "Path length: T against 1.", table),
        grows(whole, layer, "MB", "Alignments are computed T x T times: T^2.", "Bahdanau et al. 2015, section A.1.2"),
    ]


def _crossing_claim(points: Mapping[str, Figures]) -> Claim:
    figures = ("Mflop", "ms")
    crossings = [crossing(points, f"attention, eager, {figure}", f"LSTM, {figure}") for figure in figures]
    cheaper = [row for length, row in points.items() if int(length) < WIDTH]
    return Claim(
        source="Vaswani et al. 2017, section 4",
        claim=f"Attention takes fewer operations than an LSTM while T is below d = {WIDTH}.",
        measured="; ".join(
            f"{figure}: equal at {'no measured length' if at is None else f'T = {at:.0f}'}"
            for figure, at in zip(figures, crossings, strict=True)
        ),
        holds=all(row["attention, eager, Mflop"] < row["LSTM, Mflop"] for row in cheaper),
    )


def _model_claims(results: Results) -> list[Claim]:
    transformer, lstm = f"{_TASK} transformer", f"{_TASK} lstm"
    speed = results.alone[_SPEED]

    def far(name: str) -> str:
        return f"{name} {results.shown(name, 'far over near', '.3g')}"

    def faster(figure: str, claim: str) -> Claim:
        measured = f"{figure}: {', '.join(f'{name} {values[figure]:,.0f}' for name, values in speed.items())}"
        holds = speed[transformer][figure] > speed[lstm][figure]
        return Claim(source="Vaswani et al. 2017, section 1", claim=claim, measured=measured, holds=holds)

    return [
        Claim(
            source="Vaswani et al. 2017, section 4",
            claim="The gradient reaches distant tokens in attention; in an LSTM it fades to less than half of that.",
            measured=f"untrained, farthest over nearest token: {far(transformer)}, {far(lstm)}",
            holds=results.mean(lstm, "far over near") < results.mean(transformer, "far over near") / 2,
        ),
        faster(TRAINING, "The Transformer trains faster, because positions run in parallel (here on one core)."),
    ]


def _draw(results: Results, target: Path) -> None:
    scales = dict(xscale="log", yscale="log", xlabel="tokens")
    layer, whole = results.alone[_LAYERS], results.alone[_MODELS]
    panels(
        [
            Panel(series=_by_length(layer, LAYERS, "ms"), labels=scales | {"ylabel": "ms, one layer"}),
            Panel(series=_by_length(layer, LAYERS, "MB"), labels=scales | {"ylabel": "peak MB, one layer"}),
            Panel(
                series=_by_length(whole, LOSSES, "MB"),
                labels=scales | {"ylabel": "peak MB, training step of whole models"},
            ),
            Panel(
                series=_gradients(results),
                labels=dict(xlabel="distance to the end of the source", ylabel="norm of the gradient", yscale="log"),
            ),
        ],
        target,
    )


def _by_length(points: Mapping[str, Figures], names: Mapping[str, object], unit: str) -> dict[str, Points]:
    return {name: {float(length): [row[f"{name}, {unit}"]] for length, row in points.items()} for name in names}


def _gradients(results: Results) -> dict[str, Points]:
    return {
        f"{name}, {state}": {
            float(distance): norms
            for distance, norms in enumerate(zip(*(r.figures[state] for r in group if r.figures), strict=True))
        }
        for name, group in results.trials.items()
        for state in ("untrained", "trained")
    }


COMPLEXITY = Experiment(
    name="complexity",
    question="What do attention and recurrence cost by length, and how far does a gradient reach?",
    trials=_trials,
    measure=_measure,
    columns={
        "far over near": ("gradient at the farthest token over the nearest, untrained", 3),
        "share of the right token": ("gradient on the right token, trained, %", 1),
    },
    claims=_claims,
    draw=_draw,
    alone=_alone,
)
