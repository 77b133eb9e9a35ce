"""Claims about beams: a difference smaller than that between seeds decides nothing."""

from __future__ import annotations

import pytest

from antiphon.lab.experiment import Results
from antiphon.lab.experiments.decoding import DECODING
from antiphon.lab.trial import Result

BASELINE, CACHING, SEARCH = "baseline", "seconds to decode one target, PyTorch, one thread", "through the server"


def results(gain: float) -> Results:
    """Return three seeds with 30, 31 and 32 BLEU, whose deviation is 1, and a beam 4 that gains on greedy."""
    bleu = {"greedy": 30.0, "beam 4": 30.0 + gain, "beam 8": 30.0, "sampling, temperature 1": 20.0}
    times = {str(length): {"cached": length / 1e4, "recomputed": length**2 / 1e6} for length in (8, 16, 32, 64)}
    trials = [
        Result(name=BASELINE, seed=seed, figures={"bleu": value}, curve=[], train_s=1.0, machine="one")
        for seed, value in enumerate((30.0, 31.0, 32.0), 1)
    ]
    search = {name: {"BLEU": value, "sentences/s": 1.0} for name, value in bleu.items()}
    return Results(trials={BASELINE: trials}, alone={CACHING: times, SEARCH: search})


@pytest.mark.parametrize(("gain", "verdict"), [(1.5, True), (0.9, None), (-0.9, None), (-1.5, False)])
def test_beams_are_better_or_worse_only_beyond_the_deviation_over_seeds(gain: float, *, verdict: bool | None) -> None:
    (claim,) = (claim for claim in DECODING.claims(results(gain)) if claim.claim.startswith("Beam 4"))
    assert claim.holds is verdict


@pytest.mark.parametrize(("gain", "holds"), [(-0.4, True), (-0.6, False)])
def test_wide_beams_bring_little_below_half_a_point(gain: float, *, holds: bool) -> None:
    (claim,) = (claim for claim in DECODING.claims(results(gain)) if claim.claim.startswith("Beams wider"))
    assert claim.holds is holds
