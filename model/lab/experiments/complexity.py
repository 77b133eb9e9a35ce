"""Experiment `complexity`: attention against recurrence, measured instead of copied (Vaswani et al. 2017, table 1).

The gradient at large distances is that of whole models: untrained, and trained on `reverse`, whose last output is the
first input.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from antiphon.model.checkpoints.checkpoint import load_checkpoint
from antiphon.model.lab.data.algorithms import Algorithm, algorithm_dataset
from antiphon.model.lab.experiment import Claim, Experiment, Results
from antiphon.model.lab.experiments import algorithms
from antiphon.model.lab.measures import layers
from antiphon.model.lab.measures.distances import gradient_by_distance
from antiphon.model.lab.measures.growth import growth
from antiphon.model.lab.pictures import curves
from antiphon.model.lab.recurrent.greedy import recurrent_greedy
from antiphon.model.lab.recurrent.lstm import RecurrentModel
from antiphon.model.lab.recurrent.recurrent_task import RecurrentLoss, load_recurrent
from antiphon.model.lab.setting import Setting
from antiphon.model.lab.trial import Figures, Trial
from antiphon.model.training.data.translation_data import Batch, Example, collate
from antiphon.model.training.tasks.translation_task import BatchLoss
from antiphon.model.transformer.greedy import greedy
from antiphon.model.transformer.transformer import Transformer

_TASK: Algorithm = "reverse"
_LENGTHS, _TOY_LENGTHS = (64, 128, 256, 512, 1024, 2048), (8, 16)
_STEPWISE_LENGTHS = (16, 32, 64, 128)
_RUNS = 5
_ROWS = 64
_LAYERS = "one layer of width 128, forward and backward"
_PATHS = "one layer: operations in sequence and distances"
_SPEED = "both models, rows of the longest training length"


def _trials(setting: Setting) -> list[Trial]:
    return [trial for trial in algorithms.trials(setting) if trial.name.startswith(_TASK)]


def _measure(setting: Setting, trial: Trial, averaged: Path) -> Figures:
    """Return norms of the gradient by distance, at the start and after training."""
    torch.manual_seed(trial.seed)
    batch, model, loss, embedding = _opened(setting, trial.name, averaged)
    trained = gradient_by_distance(loss, embedding, batch)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LSTM | nn.LSTMCell | nn.Embedding):
            module.reset_parameters()
    untrained = gradient_by_distance(loss, embedding, batch)
    return {
        "far over near": untrained[-1] / untrained[0],
        "share of the right token": 100 * trained[-1] / sum(trained),
        "untrained": untrained,
        "trained": trained,
    }


def _opened(setting: Setting, name: str, averaged: Path) -> tuple[Batch, nn.Module, nn.Module, nn.Embedding]:
    """Return test examples of one length with the trained model, its loss and the embedding of its sources."""
    sizes = algorithms.sizes_of(setting)
    dataset = algorithm_dataset(_TASK, setting.made_data, sizes)
    pairs = [pair for pair in dataset.tests["in range"] if len(pair[0].split()) == sizes.max_len][:_ROWS]
    if name.endswith("lstm"):
        recurrent = load_recurrent(averaged)
        model, tokenizer = recurrent.model, recurrent.tokenizer
        found: tuple[nn.Module, nn.Module, nn.Embedding] = model, RecurrentLoss(model), model.encoder.embedding
    else:
        checkpoint = load_checkpoint(averaged)
        assert checkpoint.model.encoder is not None
        tokenizer = checkpoint.tokenizer
        found = checkpoint.model, BatchLoss(checkpoint.model), checkpoint.model.encoder.embedding
    examples = [
        Example(source=[*tokenizer.encode(source), tokenizer.eos_id], target=tokenizer.encode(target))
        for source, target in pairs
    ]
    return (collate(examples, tokenizer), *found)


def _alone(setting: Setting, trained: Mapping[str, Path]) -> Figures:
    torch.set_num_threads(1)
    lengths = _TOY_LENGTHS if setting.is_toy else _LENGTHS
    stepwise = _TOY_LENGTHS if setting.is_toy else _STEPWISE_LENGTHS
    return {
        _LAYERS: {str(length): layers.costs(length, _RUNS) for length in lengths},
        _PATHS: {str(length): layers.distances(length) for length in stepwise},
        _SPEED: {name: _speed(setting, name, averaged) for name, averaged in trained.items()},
    }


def _speed(setting: Setting, name: str, averaged: Path) -> Figures:
    batch, model, loss, _ = _opened(setting, name, averaged)
    sources = [row[:length].tolist() for row, length in zip(batch.source, batch.source_lens.tolist(), strict=True)]
    decode = partial(recurrent_greedy, model) if isinstance(model, RecurrentModel) else partial(greedy, _own(model))
    tokens = float(batch.counts.sum())
    return {
        "training, tokens/s": tokens / _median_s(lambda: loss(batch, 0.0).sum().backward()),
        "decoding, tokens/s": tokens / _median_s(lambda: decode(sources, batch.inputs.shape[1])),
    }


def _own(model: nn.Module) -> Transformer:
    assert isinstance(model, Transformer)
    return model


def _median_s(run: Callable[[], object]) -> float:
    run()  # not measured: the first run compiles kernels
    times = []
    for _ in range(_RUNS):
        started_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def _claims(results: Results) -> Sequence[Claim]:
    at_layers, at_paths, speed = (results.alone[name] for name in (_LAYERS, _PATHS, _SPEED))

    def grows(points: Mapping[str, Figures], attention: str, lstm: str, claim: str, *, faster: bool) -> Claim:
        one, other = growth(points, attention), growth(points, lstm)
        measured = f"attention T^{one:.2f}, LSTM T^{other:.2f}"
        holds = one > other + 0.3 if faster else other > one + 0.3
        return Claim(source="Vaswani et al. 2017, table 1", claim=claim, measured=measured, holds=holds)

    def far(model: str) -> str:
        name = f"{_TASK} {model}"
        return f"{results.mean(name, 'far over near'):.3g} ± {results.deviation(name, 'far over near'):.2g} ({model})"

    def per_second(figure: str) -> str:
        return ", ".join(f"{name} {values[figure]:,.0f}" for name, values in speed.items())

    training, names = "training, tokens/s", [f"{_TASK} transformer", f"{_TASK} lstm"]
    eager, lstm = "attention, eager", "LSTM"
    return [
        grows(at_layers, f"{eager}, Mflop", f"{lstm}, Mflop", "Operations: T^2 d against T d^2.", faster=True),
        grows(at_layers, f"{eager}, ms", f"{lstm}, ms", "So time grows faster with T for attention.", faster=True),
        grows(at_layers, f"{eager}, MB", f"{lstm}, MB", "So does memory, if weights are stored.", faster=True),
        grows(at_paths, "attention, in sequence", "LSTM, in sequence", "Steps in sequence: 1 and T.", faster=False),
        grows(at_paths, "attention, first to last", "LSTM, first to last", "Path length: 1 and T.", faster=False),
        Claim(
            source="Vaswani et al. 2017, section 4",
            claim="The gradient reaches distant tokens in attention; in an LSTM it fades.",
            measured=f"untrained, farthest over nearest token: {far('transformer')}, {far('lstm')}",
            holds=results.is_above(names[0], names[1], "far over near"),
        ),
        Claim(
            source="Vaswani et al. 2017, section 1",
            claim="The Transformer trains faster, because positions run in parallel (here on one core).",
            measured=f"tokens/s: {per_second(training)}",
            holds=speed[names[0]][training] > speed[names[1]][training],
        ),
    ]


def _draw(results: Results, target: Path) -> None:
    points = results.alone[_LAYERS]
    series = {
        name: {float(length): [figures[f"{name}, ms"]] for length, figures in points.items()} for name in layers.LAYERS
    }
    curves(series, target, xlabel="tokens", ylabel="ms, forward and backward", xscale="log", yscale="log")


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
