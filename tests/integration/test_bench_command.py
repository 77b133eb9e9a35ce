"""`antiphon bench` as a process, small: what it reports and that the sides agree, never how fast they are."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from antiphon.model.bundle import load_bundle
from antiphon.service.bench.setup import Setup
from antiphon.service.bench.sources import everyday
from tests.integration.process import PATIENCE_S, antiphon, environment

SENTENCES = "Eine Katze liest ein Buch.\nThe old man sees the bridge in the rain.\n"
REFERENCES = "A cat reads a book.\nDer alte Mann sieht die Brücke im Regen.\n"
SMALL = ("--threads", "1", "--repeat", "1", "--seconds", "0.1")


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, ...]:
    """Flags that name sentences and their references."""
    (tmp_path / "source.txt").write_text(SENTENCES, encoding="utf-8")
    (tmp_path / "reference.txt").write_text(REFERENCES, encoding="utf-8")
    return ("--source", str(tmp_path / "source.txt"), "--reference", str(tmp_path / "reference.txt"))


def findings_of(tmp_path: Path, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """What the bench writes as JSON; the table has a line for each."""
    found = tmp_path / "found.json"
    ended = antiphon("bench", *arguments, *SMALL, "--json", str(found))
    assert ended.returncode == 0, ended.stderr.decode()
    findings: list[dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))["sections"]
    assert ended.stdout.decode().count("\n") >= 2 + len(findings)
    assert all(finding["antiphon"] >= 0 for finding in findings)
    return findings


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model, small: its bundle and checkpoint."""
    folder = tmp_path_factory.mktemp("made") / "random"
    command = (sys.executable, "-m", "antiphon.service.bench.make", "random", "tiny", str(folder))
    subprocess.run(command, check=True, timeout=PATIENCE_S, env=environment())
    return folder


@pytest.mark.parametrize(
    ("section", "cases"),
    [
        ("engine", {("tokens/s", True), ("tokens/CPU s", True)}),
        ("grpc_overhead", {("tokens/s", True)}),
        ("startup", {("s", False), ("MB", False)}),
    ],
)
def test_section_of_our_own_parts_reports_figures(
    bundle: Path, tmp_path: Path, texts: tuple[str, ...], section: str, cases: set[tuple[str, bool]]
) -> None:
    arguments = (str(bundle), "--section", section, "--model", "bundle", "--rows", "4", *texts)
    findings = findings_of(tmp_path, arguments)
    assert {finding["name"] for finding in findings} == {section}
    assert {(finding["unit"], finding["baseline"] is not None) for finding in findings} == cases
    assert all(finding["ctranslate2"] is None for finding in findings)
    assert all(finding["ratio"] > 0 for finding in findings if finding["baseline"] is not None)


def test_sections_beside_ctranslate2_run_the_same_work(made: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    sections = ("decode", "encode", "poisson", "memory")
    plot, profile = tmp_path / "decode.png", tmp_path / "profile.txt"
    flags = ("--rows", "8", "--plot", str(plot), "--profile", str(profile), "--work", str(tmp_path / "work"))
    arguments = (str(made / "bundle"), "--section", *sections, "--model", "bundle", *texts)
    findings = findings_of(tmp_path, (*arguments, "--checkpoint", str(made / "checkpoint"), *flags))
    assert list(dict.fromkeys(finding["name"] for finding in findings)) == list(sections)
    assert all(finding["ctranslate2"] is not None for finding in findings)
    assert [finding["rows"] for finding in findings if finding["name"] == "decode"] == [8, 8]
    units = {finding["unit"] for finding in findings}
    assert units == {"tokens/s", "BLEU", "source tokens/s", "requests/s", "ms", "MB"}
    # int8 weights are the same on both sides, activations are rounded otherwise: a random model may well tell.
    assert all(finding["equal_outputs"] > 0 for finding in findings if finding["name"] == "encode")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "decoder, 8 rows" in profile.read_text(encoding="utf-8")


def test_bundle_without_its_checkpoint_is_left_out_and_said_so(bundle: Path) -> None:
    ended = antiphon("bench", str(bundle), "--section", "decode", "--model", "bundle", *SMALL)
    assert ended.returncode == 0, ended.stderr.decode()
    assert b"needs --checkpoint" in ended.stderr


def test_random_model_is_made_once_and_never_ends_by_itself(made: Path, tmp_path: Path) -> None:
    """The section itself counts the tokens of both sides."""
    setup = Setup(
        bundle=load_bundle(made / "bundle"), corpus=everyday(), models=("random",), work=tmp_path, preset="tiny",
        threads=1, repeat=1,
    )  # fmt: skip
    shutil.copytree(made, setup.random_folder)
    findings = findings_of(
        tmp_path,
        ("--section", "decode", "--model", "random", "--preset", "tiny", "--rows", "4", "--work", str(tmp_path)),
    )
    assert [(finding["rows"], finding["unit"]) for finding in findings] == [(4, "tokens/s")]
    assert (setup.random_folder / "ctranslate2").is_dir()


def test_checkpoint_of_another_model_is_refused(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"")
    ended: subprocess.CompletedProcess[bytes] = antiphon(
        "bench", str(bundle), "--section", "decode", "--model", "bundle", "--checkpoint", str(tmp_path)
    )
    assert ended.returncode == 2
    assert b"--checkpoint" in ended.stderr
    assert b"is not that of the bundle" in ended.stderr
