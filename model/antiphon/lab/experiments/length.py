"""Experiment `length`: training at one length, tests at 1, 1.5, 2 and 4 times that length, for each kind of positions.

Press et al. 2022 (ALiBi) and Kazemnejad et al. 2023. Models are then exported for the longest test and served, and the
served scores are compared with those of PyTorch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint, with_lengths
from antiphon.lab.accuracy import exact_match, forced, share_correct
from antiphon.lab.datasets import TOY_SIZES, Algorithm, Dataset, Sizes, algorithm_dataset
from antiphon.lab.experiment import Claim, Experiment, Results, Setting
from antiphon.lab.report import Points, curves
from antiphon.lab.served import exported, serving
from antiphon.lab.trial import Figures, Trial
from antiphon.training.corpus import Pair
from antiphon.training.recipe import Recipe
from antiphon.transformer.greedy import greedy

KINDS = ("none", "sinusoidal", "learned", "t5_relative", "rope", "alibi")
TASKS: tuple[Algorithm, ...] = ("copy", "reverse")
FACTORS = (1.0, 1.5, 2.0, 4.0)
_STEPS = 1500
_SCORED = 8  # served scores of each length
_SERVED, _DIFFERENCE = "served after export for the longest test", "largest difference of a score from PyTorch, nats"


def _sizes(setting: Setting) -> Sizes:
    return TOY_SIZES if setting.is_toy else Sizes(max_len=16, train=20_000, test=400)


def _dataset(setting: Setting, task: Algorithm) -> Dataset:
    return algorithm_dataset(task, setting.made_data, _sizes(setting))


def _trials(setting: Setting) -> list[Trial]:
    return [
        Trial(name=f"{task} {kind}", recipe=_recipe(setting, task, kind, seed), data=setting.made_data)
        for task in TASKS
        for kind in KINDS
        for seed in setting.seeds
    ]


def _recipe(setting: Setting, task: Algorithm, kind: str, seed: int) -> Recipe:
    sizes, dataset = _sizes(setting), _dataset(setting, task)
    # Learned positions need their table from the start; its rows beyond the training length are never trained.
    longest = sizes.longest_tokens if kind == "learned" else sizes.max_len + 2
    max_steps = setting.steps(_STEPS)
    return Recipe.model_validate(
        {
            "name": f"lab-length-{task}-{kind}",
            "vocab_size": dataset.vocab_size,
            "data": dataset.data.model_dump(),
            "model": dict(
                d_model=64, encoder_layers=2, decoder_layers=2, num_heads=4, d_ff=256, dropout=0.1, positions=kind,
                norm_placement="pre", max_source_len=longest, max_target_len=longest,
            ),
            "train": dict(
                batch_tokens=2048, max_steps=max_steps, warmup_steps=200, peak_lr=3e-3, label_smoothing=0.0,
                cooldown_steps=max_steps // 3, checkpoint_every_steps=max(12, max_steps // 5), average_last=1,
                patience=1000, seed=seed,
            ),
        }
    )  # fmt: skip


def _longer(setting: Setting, averaged: Path) -> Checkpoint:
    """Return the trained model with lengths for the longest test."""
    checkpoint, longest = load_checkpoint(averaged), _sizes(setting).longest_tokens
    if checkpoint.config.positions == "learned":
        return checkpoint
    return with_lengths(checkpoint, max_source_len=longest, max_target_len=longest)


def _tests(setting: Setting, name: str) -> dict[float, Sequence[Pair]]:
    """Return the test pairs of a setting by factor of the longest training length."""
    task = next(task for task in TASKS if name.startswith(task))
    sizes, dataset = _sizes(setting), _dataset(setting, task)
    longest = [pair for pair in dataset.tests["in range"] if len(pair[0].split()) > sizes.max_len // 2]
    beyond = {factor: dataset.tests[f"length {int(factor * sizes.max_len)}"] for factor in FACTORS[1:]}
    return {1.0: longest, **beyond}


def _measure(setting: Setting, trial: Trial, averaged: Path) -> Figures:
    checkpoint = _longer(setting, averaged)
    figures: Figures = {}
    for factor, pairs in _tests(setting, trial.name).items():
        matches = exact_match(partial(greedy, checkpoint.model), checkpoint.tokenizer, pairs)
        best = [token for target in forced(checkpoint, pairs) for token in target.is_best]
        figures[f"exact {factor:g}"] = 100 * share_correct(matches)
        figures[f"tokens {factor:g}"] = 100 * statistics.fmean(best)
    return figures


def _serve(setting: Setting, trained: Mapping[str, Path]) -> Figures:
    """Export and serve the model of each setting; return the largest difference of any score."""
    differences: dict[str, Figures] = {}
    chosen = list(trained.items())[: 2 if setting.is_toy else None]
    for name, averaged in chosen:
        tests = _tests(setting, name)
        scored = [pair for pairs in tests.values() for pair in pairs[:_SCORED]]
        differences[name] = {
            _DIFFERENCE: _largest_difference(_longer(setting, averaged), averaged.with_name("bundle"), scored)
        }
    return {_SERVED: differences}


def _largest_difference(checkpoint: Checkpoint, bundle: Path, pairs: Sequence[Pair]) -> float:
    exported(checkpoint, bundle)
    expected = [sum(target.logprobs) for target in forced(checkpoint, pairs)]
    with serving(bundle) as server:
        scores = [server.client.score(source, target).score for source, target in pairs]
    return max(abs(score - reference) for score, reference in zip(scores, expected, strict=True))


def _claims(results: Results) -> Sequence[Claim]:
    def accuracy(name: str, factor: float) -> str:
        figure = f"tokens {factor:g}"
        return f"{results.shown(name, figure, '.0f')} %"

    differences = [figures[_DIFFERENCE] for figures in results.alone.get(_SERVED, {}).values()]
    worst = max(differences, default=float("nan"))
    return [
        Claim(
            source="Press et al. 2022, section 1",
            claim=f"Sinusoidal positions do not extrapolate ({task}, 2 times the length); ALiBi does better.",
            measured=f"tokens right: {accuracy(f'{task} alibi', 2)}, sinusoidal {accuracy(f'{task} sinusoidal', 2)}",
            holds=results.is_above(f"{task} alibi", f"{task} sinusoidal", "tokens 2"),
        )
        for task in TASKS
    ] + [
        Claim(
            source="Kazemnejad et al. 2023",
            claim="A causal decoder without positions extrapolates better than with learned ones (copy, 2 times).",
            measured=f"tokens right: {accuracy('copy none', 2)}, learned {accuracy('copy learned', 2)}",
            holds=results.is_above("copy none", "copy learned", "tokens 2"),
        ),
        Claim(
            source="this project",
            claim="Models exported with --max-source-len give the scores of PyTorch at every length.",
            measured=f"largest difference {worst:.1e} nats over {len(differences)} models",
            holds=worst < 1e-3,
        ),
    ]


def _draw(results: Results, target: Path) -> None:
    def points(name: str) -> Points:
        return {factor: results.values(name, f"tokens {factor:g}") for factor in FACTORS}

    series = {
        name: points(name) for name in results.trials if name.startswith("copy") and results.values(name, "tokens 1")
    }
    curves(series, target, xlabel="length / longest training length", ylabel="tokens right, %, copy")


LENGTH = Experiment(
    name="length",
    question="Which kinds of positions still work on texts longer than those of training?",
    trials=_trials,
    measure=_measure,
    columns={
        f"{kind} {factor:g}": (f"{kind}, {factor:g} times, %", 1) for kind in ("exact", "tokens") for factor in FACTORS
    },
    claims=_claims,
    draw=_draw,
    alone=_serve,
)
