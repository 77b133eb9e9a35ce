"""The page of measurements: its committed text, its files, and a new file of `antiphon bench --json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from antiphon.tools.bench.page import FIELDS, MARKER, updated
from antiphon.tools.bench.report import Finding, to_json

DOCS = Path(__file__).parents[3] / "docs"
FILES = sorted((DOCS / "benchmarks").glob("*.json"))


def test_committed_page_equals_the_generated_one() -> None:
    page = (DOCS / "BENCHMARKS.md").read_text(encoding="utf-8")
    assert updated(page, DOCS / "benchmarks") == page, "run: python -m antiphon.tools.bench.page docs/BENCHMARKS.md"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_measurements_have_their_machine_commit_and_command(path: Path) -> None:
    measured = json.loads(path.read_text(encoding="utf-8"))
    assert all(measured[field] for field in FIELDS)
    assert measured["title"]


def test_file_of_bench_appears_on_the_page(tmp_path: Path) -> None:
    finding = Finding(name="decode", case="sentences", rows=64, antiphon=9779.0, ctranslate2=3190.0, unit="tokens/s")
    (tmp_path / "zen6.json").write_text(to_json([finding], 2, "antiphon bench --section decode"), encoding="utf-8")
    page = updated(f"# Benchmarks\n\n{MARKER}old figures\n", tmp_path)
    assert page.startswith(f"# Benchmarks\n\n{MARKER}\n## zen6\n")
    assert "| decode | sentences | 64 | 9,779 | 3,190 |" in page
    assert "\n    antiphon bench --section decode\n" in page
    assert "old figures" not in page


def test_table_shows_rows_beside_each_other(tmp_path: Path) -> None:
    table = {"name": "n", "title": "x", "columns": ["y"], "beside": 2, "rows": [["a", "1"], ["b", "2"], ["c", "3"]]}
    measured = {"date": "2026", "machine": "m", "commit": "c", "command": ["one", "two"], "sections": [table]}
    (tmp_path / "a.json").write_text(json.dumps(measured), encoding="utf-8")
    lines = updated(MARKER, tmp_path).splitlines()
    assert lines[-2:] == ["| a | 1 | c | 3 |", "| b | 2 |  |  |"]
    assert [line for line in lines if line.startswith("    ")] == ["    one", "    two"]


def test_file_without_a_field_and_page_without_marker_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"machine": "m"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.json: date is missing"):
        updated(MARKER, tmp_path)
    with pytest.raises(ValueError, match="no line"):
        updated("# Benchmarks\n", tmp_path)
