"""Reports: means, deviations and verdicts over seeds, claims about beams, and the files that are written."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from antiphon.cli.main import main
from antiphon.lab.experiment import Claim, Experiment, Results
from antiphon.lab.experiments.decoding import DECODING
from antiphon.lab.report import table, write_report
from antiphon.lab.trial import Result
from tests.unit.lab.recurrent_models import toy_setting


def result(name: str, seed: int, value: float | None) -> Result:
    figures = {} if value is None else {"bleu": value}
    diverged = "loss is nan in step 3" if value is None else None
    return Result(
        name=name, seed=seed, figures=figures, curve=[], train_s=1.0, machine=f"machine {seed % 2}", diverged=diverged
    )


VALUES: dict[str, tuple[float | None, ...]] = {
    "good": (30.0, 31.5, 33.0),
    "near": (30.5, 31.0, 32.0),
    "bad": (10.0, 11.0, None),
    "broken": (None, None, None),
}
RESULTS = Results(
    trials={
        name: [result(name, seed, value) for seed, value in enumerate(values, 1)] for name, values in VALUES.items()
    }
)
EXPERIMENT = Experiment(
    name="example",
    question="Is it good?",
    trials=lambda _: (),
    measure=lambda *_: {},
    columns={"bleu": ("BLEU", 2)},
    claims=lambda found: [
        Claim(source="nobody", claim="bad is best", measured="no", holds=found.is_above("bad", "good", "bleu")),
        Claim(source="nobody", claim="near is best", measured="?", holds=found.is_above("near", "good", "bleu")),
    ],
    draw=lambda _, target: target.touch(),
)


def test_table_has_mean_and_deviation_over_seeds_and_counts_diverged_runs() -> None:
    lines = table(EXPERIMENT, RESULTS)
    good = [30.0, 31.5, 33.0]
    assert f"| good | {statistics.mean(good):.2f} ± {statistics.stdev(good):.2f} |" in lines
    assert any(line.startswith("| bad (1 of 3 diverged) | 10.50 ± ") for line in lines)


def test_difference_within_a_deviation_is_not_decided() -> None:
    assert RESULTS.is_above("good", "bad", "bleu") is True
    assert RESULTS.is_above("bad", "good", "bleu") is False
    assert RESULTS.is_above("near", "good", "bleu") is None


def test_setting_that_diverged_is_worse_than_any_other_and_has_no_value_to_compare() -> None:
    """Regression: a claim that post-norm is worse was contradicted where post-norm diverged with every seed."""
    assert RESULTS.is_better("bad", "broken", "bleu") is True
    assert RESULTS.is_better("broken", "bad", "bleu", lower=True) is False
    assert RESULTS.is_better("good", "bad", "bleu") is True
    assert RESULTS.is_better("good", "bad", "bleu", lower=True) is False
    assert RESULTS.is_better("near", "good", "bleu") is None
    assert RESULTS.is_better("broken", "broken", "bleu") is None
    assert RESULTS.is_above("bad", "broken", "bleu") is None
    assert RESULTS.is_above("broken", "bad", "bleu") is None


def test_report_prints_contradictions_as_such(tmp_path: Path) -> None:
    page = write_report(EXPERIMENT, RESULTS, toy_setting(tmp_path), "antiphon lab example")
    assert "| nobody | bad is best | no | **contradicted** |" in page
    assert "not decided" in page
    found = json.loads((tmp_path / "example.json").read_text())
    assert [trial["figures"].get("bleu") for trial in found["trials"]] == [v for vs in VALUES.values() for v in vs]
    assert found["command"] == "antiphon lab example"
    assert {trial["machine"] for trial in found["trials"]} == {"machine 0", "machine 1"}
    assert "- seed 1, 3: machine 1\n- seed 2: machine 0\n" in page


def test_report_replaces_its_own_section_of_the_page(tmp_path: Path) -> None:
    other = replace(EXPERIMENT, name="other")
    for experiment in (EXPERIMENT, other):
        write_report(experiment, RESULTS, toy_setting(tmp_path), "first command")
    section = write_report(EXPERIMENT, RESULTS, toy_setting(tmp_path), "second command")
    page = (tmp_path / "RESULTS.md").read_text()
    assert page.startswith(f"# Results of the laboratory\n\n{section}\n## other\n")
    assert (page.count("first command"), page.count("second command")) == (1, 1)


def test_figure_of_one_seed_has_no_deviation_and_of_none_no_value() -> None:
    one = Results(trials={"good": [result("good", 1, 30.26)], "broken": [result("broken", 1, None)]})
    assert one.shown("good", "bleu") == "30.3"
    assert one.shown("broken", "bleu") == "-"
    assert RESULTS.shown("good", "bleu", ".2f") == "31.50 ± 1.50"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nothing"], "NAME is 'nothing'; experiments: ablations,"),
        (["ablations", "--scale", "0"], "--scale is '0'; it must be toy, or a number from 0.01 to 1000"),
        (["ablations", "--scale", "small"], "--scale is 'small'"),
        (["ablations", "--seeds", "0", "--scale", "toy"], "--seeds is 0; it must be from 1 to 64"),
        (["ablations", "--jobs", "65", "--scale", "toy"], "--jobs is 65; it must be from 1 to 64"),
        (["ablations"], "--data is missing"),
    ],
)
def test_wrong_options_are_named(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", *flags, "--output", str(tmp_path / "lab")]) == 2
    assert message in capsys.readouterr().err


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
