"""Every experiment runs at toy size and writes its report; at this size no verdict means anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from antiphon.cli.main import main
from antiphon.lab.command import EXPERIMENTS
from tests.unit.lab.settings import toy_setting


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_runs_at_toy_size(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = EXPERIMENTS[name]
    assert main(["lab", name, "--scale", "toy", "--seeds", "1", "--jobs", "1", "--output", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert experiment.question in page
    assert page.startswith((tmp_path / "RESULTS.md").read_text().partition("\n\n")[2])
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(found["trials"]) == len(experiment.trials(toy_setting(tmp_path))) > 0
    shown = {figure for figure in experiment.columns for trial in found["trials"] if figure in trial["figures"]}
    assert shown == set(experiment.columns), "every column has a value in some row"
    assert all(claim["source"] and claim["measured"] for claim in found["claims"])


def test_compare_is_a_command_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--scale", "1"]) == 2
    assert "--data is missing" in capsys.readouterr().err
