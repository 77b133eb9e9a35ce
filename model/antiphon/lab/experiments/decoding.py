"""Experiment `decoding`: KV caching against recomputation, and greedy, beams and sampling in quality and cost.

The first part runs in PyTorch with random weights, the second one through a real server with a trained model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from antiphon.architecture.config import preset
from antiphon.checkpoints.checkpoint import load_checkpoint
from antiphon.client import Options
from antiphon.lab.accuracy import bleu_of
from antiphon.lab.costs import growth, median_seconds
from antiphon.lab.experiment import Claim, Experiment, Results, Setting
from antiphon.lab.experiments.ablations import (
    BASELINE,
    CHANGES,
    STEPS,
    data_folder,
    measure,
    translation_data,
    trials_of,
)
from antiphon.lab.report import curves
from antiphon.lab.served import exported, served_translations, serving
from antiphon.lab.trial import Figures
from antiphon.training.corpus import load_corpus
from antiphon.transformer.greedy import greedy
from antiphon.transformer.random_model import random_transformer
from antiphon.transformer.transformer import Transformer

_LENGTHS = (32, 64, 128, 256, 512)
_TOY_LENGTHS = (4, 8)
_RUNS = 3
_SENTENCES = 500
_OPTIONS: Mapping[str, Options] = {
    "greedy": Options(temperature=0),
    **{f"beam {width}": Options(beam_width=width) for width in (2, 4, 8)},
    **{f"sampling, temperature {t:g}": Options(temperature=t, seed=1) for t in (0.3, 0.7, 1.0)},
    "sampling, top-p 0.9": Options(temperature=1.0, top_p=0.9, seed=1),
}
_CACHING, _SEARCH = "seconds to decode one target, PyTorch, one thread", "through the server"


def _alone(setting: Setting, trained: Mapping[str, Path]) -> Figures:
    lengths = _TOY_LENGTHS if setting.is_toy else _LENGTHS
    return {_CACHING: caching(lengths), _SEARCH: _search(setting, trained[BASELINE])}


def caching(lengths: Sequence[int]) -> dict[str, Figures]:
    """Return the median seconds to decode one target of each length, with the cache and by recomputation."""
    torch.set_num_threads(1)
    config = preset("tiny", d_model=256, d_ff=1024, num_heads=4, max_target_len=max(lengths), tie_output=False)
    model = random_transformer(config)
    source = [*range(4, 20), config.eos_id]
    return {
        str(length): median_seconds(
            {
                "cached": partial(greedy, model, [source], length, ends=False),
                "recomputed": partial(recomputed, model, source, length),
            },
            _RUNS,
        )
        for length in lengths
    }


@torch.no_grad()
def recomputed(model: Transformer, source: Sequence[int], length: int) -> list[int]:
    """Decode `length` tokens greedily; every step computes all positions again. The end token has no effect."""
    cross_kv = model.project_memory(model.encode(torch.tensor([source])))
    ids = [model.config.bos_id]
    for _ in range(length):
        hidden = model.decode(torch.tensor([ids]), cross_kv)
        ids.append(int(model.logits(hidden[:, -1]).argmax()))
    return ids[1:]


def _search(setting: Setting, averaged: Path) -> dict[str, Figures]:
    bundle = averaged.with_name("bundle")
    exported(load_checkpoint(averaged), bundle)
    data = translation_data(setting)
    pairs = load_corpus(data, data_folder(setting)).test[: 4 if setting.is_toy else _SENTENCES]
    sources = [source for source, _ in pairs]
    with serving(bundle) as server:
        runs = {
            name: partial(served_translations, server.client, sources, options) for name, options in _OPTIONS.items()
        }
        answers = {name: run() for name, run in runs.items()}
        times = median_seconds(runs, _RUNS)
    is_tokenised = data.preprocess == "moses-lower"
    return {
        name: {
            "BLEU": bleu_of(answers[name], pairs, is_tokenised=is_tokenised),
            "sentences/s": len(pairs) / times[name],
        }
        for name in runs
    }


def _claims(results: Results) -> Sequence[Claim]:
    cached, recomputation = (growth(results.alone[_CACHING], kind) for kind in ("cached", "recomputed"))
    search = results.alone[_SEARCH]
    gain = search["beam 4"]["BLEU"] - search["greedy"]["BLEU"]
    noise = results.deviation(BASELINE, "bleu")  # only one model was searched; other seeds differ by this

    def scores(*names: str) -> str:
        return ", ".join(
            f"{name} {search[name]['BLEU']:.1f} BLEU, {search[name]['sentences/s']:.0f}/s" for name in names
        )

    return [
        Claim(
            source="Vaswani et al. 2017, table 1",
            claim="Recomputation makes the cost of a target grow faster with its length than a cache does.",
            measured=f"time grows as T^{cached:.2f} with the cache, as T^{recomputation:.2f} without",
            holds=recomputation > cached,
        ),
        Claim(
            source="Vaswani et al. 2017, section 6.1",
            claim="Beam 4 translates better than greedy.",
            measured=scores("beam 4", "greedy"),
            holds=gain > 0 if abs(gain) > noise else None,
        ),
        Claim(
            source="Koehn and Knowles 2017, section 3.6",
            claim="Beams wider than 4 bring little.",
            measured=scores("beam 8", "beam 4"),
            holds=search["beam 8"]["BLEU"] - search["beam 4"]["BLEU"] < 0.5,
        ),
        Claim(
            source="Holtzman et al. 2020",
            claim="Sampling from the whole distribution costs quality where one answer is right.",
            measured=scores("sampling, temperature 1", "greedy"),
            holds=search["sampling, temperature 1"]["BLEU"] < search["greedy"]["BLEU"],
        ),
    ]


def _draw(results: Results, target: Path) -> None:
    points = results.alone[_CACHING]
    series = {
        kind: {float(length): [values[kind]] for length, values in points.items()} for kind in ("cached", "recomputed")
    }
    curves(series, target, xlabel="target tokens", ylabel="seconds", xscale="log", yscale="log")


DECODING = Experiment(
    name="decoding",
    question="What does the KV cache save, and what do beams and sampling cost and bring?",
    trials=partial(trials_of, changes={BASELINE: CHANGES[BASELINE]}, steps=STEPS),
    measure=measure,
    columns={"bleu": ("BLEU, greedy", 1)},
    claims=_claims,
    draw=_draw,
    alone=_alone,
)
