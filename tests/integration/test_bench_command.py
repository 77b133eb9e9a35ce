"""`antiphon bench` as a process, small: what it reports and that the sides agree, never how fast they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.process import antiphon


@pytest.mark.parametrize(
    ("section", "cases"),
    [
        ("engine", {("tokens/s", True), ("tokens/CPU s", True)}),
        ("grpc_overhead", {("tokens/s", True)}),
        ("startup", {("s", False), ("MB", False)}),
    ],
)
def test_section_reports_figures_and_compares_outputs(
    bundle: Path, tmp_path: Path, section: str, cases: set[tuple[str, bool]]
) -> None:
    found, source = tmp_path / "found.json", tmp_path / "source.txt"
    source.write_text("Eine Katze liest ein Buch.\nThe old man sees the bridge in the rain.\n", encoding="utf-8")
    flags = ("--rows", "4", "--threads", "1", "--repeat", "1", "--source", str(source), "--json", str(found))
    ended = antiphon("bench", str(bundle), "--section", section, *flags)
    assert ended.returncode == 0, ended.stderr.decode()
    findings = json.loads(found.read_text(encoding="utf-8"))["sections"]
    assert {finding["name"] for finding in findings} == {section}
    assert {(finding["unit"], finding["baseline"] is not None) for finding in findings} == cases
    assert all(finding["antiphon"] > 0 for finding in findings)
    assert all(finding["ratio"] > 0 for finding in findings if finding["baseline"] is not None)
    table = ended.stdout.decode().splitlines()
    assert len(table) == 2 + len(findings)
