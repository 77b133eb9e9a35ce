"""`make card` on the stand-in for CUDA: its parts, what a second run does, and parts that fail.

The processes of the parts, and the server that one of them starts, load the stand-in by standin/site. Figures mean
nothing here. The part `cpu` needs no card: tests/parity/test_card_beside.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from antiphon.tools.bench.gpu.__main__ import EXIT_FAILED, EXIT_NO_DEVICE, EXIT_NO_TIME
from antiphon.tools.bench.gpu.parts import PARTS, SERVER_FLAGS
from tests.cuda.standin.device import StandIn

SITE = Path(__file__).parent / "standin" / "site"
SMALLEST = ("--shape", "tiny", "--rows", "1", "--served-rows", "1", "--sources", "5", "--steps", "1")
UNLIMITED = ("--budget-s", "1e9", "--patience", "1e6")
ALONE = ["decode", "beams", "sampling", "encoder"]  # of the others, none fails and none is skipped
NAMES = [part.name for part in PARTS if part.name not in ("cpu", *ALONE)]
# This environment has no transformers, no compute-sanitizer and no torch with CUDA.
MISSING = {"generate": "transformers", "sanitizer": "compute-sanitizer", "training": "torch"}

Reports = dict[str, dict[str, Any]]
Runs = tuple[tuple[int, Reports], tuple[int, Reports]]
"""Exit status and reports of two runs."""


def card(standin: StandIn | None, folder: Path, *arguments: str) -> int:
    """Run the program with the stand-in, or without; return its exit status."""
    environment = dict(os.environ)
    if standin is not None:
        environment["PYTHONPATH"] = os.pathsep.join((str(SITE), environment["PYTHONPATH"]))
        environment["STANDIN_FOLDER"] = str(standin.kernels.parent)
    command = (sys.executable, "-m", "antiphon.tools.bench.gpu", "--folder", str(folder), "--copy-bytes", "65536")
    return subprocess.run((*command, *SMALLEST, *arguments), check=False, env=environment).returncode


def reports(folder: Path) -> Reports:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that keeps the models."""
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def two_runs(standin: StandIn, work: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Run parts while a file is in the way of one model, and once more without that file."""
    folder = tmp_path_factory.mktemp("card")
    in_the_way = work / "tiny-ssru"
    in_the_way.touch()
    arguments = ("--part", *NAMES, "--work", str(work), *UNLIMITED)
    first = card(standin, folder, *arguments), reports(folder)
    in_the_way.unlink()
    return first, (card(standin, folder, *arguments), reports(folder))


def test_a_part_that_fails_says_why_and_the_others_are_done(two_runs: Runs) -> None:
    (status, first), _ = two_runs
    assert status == EXIT_FAILED
    assert {name: report["status"] for name, report in first.items()} == dict.fromkeys(NAMES, "done") | {
        "ssru": "failed"
    }
    assert "tiny-ssru" in first["ssru"]["error"]


def test_a_second_run_tries_the_failed_part_again_and_skips_the_others(two_runs: Runs) -> None:
    (_, first), (status, second) = two_runs
    assert status == 0
    assert second["ssru"]["status"] == "done"
    assert {name: report for name, report in first.items() if name != "ssru"} == {
        name: report for name, report in second.items() if name != "ssru"
    }


def test_every_part_states_device_command_and_date(two_runs: Runs) -> None:
    _, (_, last) = two_runs
    for name, report in last.items():
        assert (report["part"], report["device"]) == (name, "stand-in")
        assert f"--part {name}" in report["command"]
        assert report["date"]
        assert report["figures"]


def test_float32_tokens_equal_those_of_the_processor(two_runs: Runs) -> None:
    _, (_, last) = two_runs
    for name in ("parity", "ssru"):
        figures = {figure.get("precision"): figure for figure in last[name]["figures"]}
        assert figures["float32"]["equal_greedy_tokens"] == 1.0
        assert figures["float32"]["largest_logprob_difference"] < 1e-4


def test_clients_are_measured_beside_the_runner(two_runs: Runs) -> None:
    _, (_, last) = two_runs
    runner, *clients = last["served"]["figures"]
    served = [(way, list(flags)) for flags in SERVER_FLAGS for way in ("streams", "many")]
    assert [(figure["way"], figure["server_flags"]) for figure in clients] == served
    for figure in clients:
        assert figure["share_of_runner"] == figure["tokens_per_s"] / runner["all_tokens_per_s"]


def alone(standin: StandIn, folder: Path, work: Path, name: str) -> list[dict[str, Any]]:
    """Run one part, which must be done; return its figures."""
    assert card(standin, folder, "--part", name, "--work", str(work), *UNLIMITED) == 0
    report = reports(folder)[name]
    assert (report["status"], report["error"]) == ("done", None)
    figures: list[dict[str, Any]] = report["figures"]
    return figures


def test_steps_ahead_and_captured_graphs_are_switched_off(standin: StandIn, tmp_path: Path, work: Path) -> None:
    switched = [figure for figure in alone(standin, tmp_path, work, "decode") if "captures" in figure]
    assert [(figure["goes_ahead"], figure["captures"]) for figure in switched] == [
        (True, True),
        (False, True),
        (False, False),
    ]


def test_beams_are_measured_beside_greedy_decoding(standin: StandIn, tmp_path: Path, work: Path) -> None:
    figures = alone(standin, tmp_path, work, "beams")
    assert [(figure["requests"], figure["beam_width"]) for figure in figures] == [(1, 1), (1, 4)]
    assert all(figure["tokens_per_s"] > 0 for figure in figures)


def test_sampling_is_measured_by_its_filters(standin: StandIn, tmp_path: Path, work: Path) -> None:
    figures = alone(standin, tmp_path, work, "sampling")
    assert [figure["sampling"] for figure in figures] == ["top_k 50", "top_p 0.9", "top_k 50, top_p 0.9"]


def test_states_of_the_encoder_are_those_of_the_processor(standin: StandIn, tmp_path: Path, work: Path) -> None:
    figures = {figure.get("precision"): figure for figure in alone(standin, tmp_path, work, "encoder")}
    assert figures["float32"]["largest_difference"] < 1e-4 * figures["float32"]["largest_state"]
    assert figures[None]["texts_per_s"] > 0


def test_missing_things_are_reasons_and_no_failures(two_runs: Runs) -> None:
    _, (_, last) = two_runs
    for name, reason in MISSING.items():
        (figure,) = last[name]["figures"]
        assert reason in figure["missing"]


def test_without_time_nothing_runs(standin: StandIn, tmp_path: Path) -> None:
    assert card(standin, tmp_path, "--budget-s", "0") == EXIT_NO_TIME
    assert not list(tmp_path.iterdir())


def test_a_part_that_takes_too_long_is_ended(standin: StandIn, tmp_path: Path) -> None:
    assert card(standin, tmp_path, "--part", "parity", "--budget-s", "1e9", "--patience", "0") == EXIT_FAILED
    report = reports(tmp_path)["parity"]
    assert (report["status"], report["error"]) == ("failed", "ended after 0 s, its time")


def test_a_report_that_cannot_be_written_costs_its_part_only(standin: StandIn, tmp_path: Path) -> None:
    (tmp_path / "sanitizer.json").mkdir()
    assert card(standin, tmp_path, "--part", "generate", "sanitizer", "training", *UNLIMITED) == EXIT_FAILED
    (tmp_path / "sanitizer.json").rmdir()
    assert {name: report["status"] for name, report in reports(tmp_path).items()} == {
        "generate": "done",
        "training": "done",
    }


def test_without_a_card_the_program_names_what_is_missing(tmp_path: Path) -> None:
    assert card(None, tmp_path / "card") == EXIT_NO_DEVICE
    assert not (tmp_path / "card").exists()
