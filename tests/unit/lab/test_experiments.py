"""Every experiment runs at toy size and writes its report; at this size no verdict means anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from antiphon.model.lab.experiment import run_trials
from antiphon.model.lab.registry import EXPERIMENTS
from antiphon.model.lab.report import write_report
from tests.unit.lab.settings import toy_setting


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_runs_at_toy_size(name: str, tmp_path: Path) -> None:
    experiment, setting = EXPERIMENTS[name], toy_setting(tmp_path)
    results = run_trials(experiment, setting, jobs=1)
    page = write_report(experiment, results, setting, f"antiphon lab {name}").read_text()
    assert experiment.question in page
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(found["trials"]) == len(experiment.trials(setting)) > 0
    shown = {figure for figure in experiment.columns for trial in found["trials"] if figure in trial["figures"]}
    assert shown == set(experiment.columns), "every column has a value in some row"
    assert all(claim["source"] and claim["measured"] for claim in found["claims"])
