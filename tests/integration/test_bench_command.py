"""`antiphon bench` as a process, with small models: its report and the equality of outputs, never the speed."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from antiphon.bundle.manifest import load_bundle
from antiphon.tools.bench.corpus import everyday
from antiphon.tools.bench.setup import Setup
from tests.integration.process import antiphon, environment

pytestmark = pytest.mark.combinations

SENTENCES = "Eine Katze liest ein Buch.\nThe old man sees the bridge in the rain.\n"
REFERENCES = "A cat reads a book.\nDer alte Mann sieht die Brücke im Regen.\n"
# Each bench starts many processes, which take minutes on a very busy machine. This limit turns a hang into a failed
# test with a message, before faulthandler_timeout of pyproject.toml ends the whole run.
PATIENCE_S = 840
SMALL = ("--threads", "1", "--repeat", "1", "--seconds", "0.1")


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, ...]:
    """Return flags that name sentences and their references."""
    (tmp_path / "source.txt").write_text(SENTENCES, encoding="utf-8")
    (tmp_path / "reference.txt").write_text(REFERENCES, encoding="utf-8")
    return ("--source", str(tmp_path / "source.txt"), "--reference", str(tmp_path / "reference.txt"))


def findings_of(tmp_path: Path, arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Run the bench and return the findings that it writes as JSON; check that the table has a line for each."""
    found = tmp_path / "found.json"
    ended = antiphon("bench", *arguments, *SMALL, "--json", str(found), timeout_s=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr.decode()
    findings: list[dict[str, Any]] = json.loads(found.read_text(encoding="utf-8"))["sections"]
    assert ended.stdout.decode().count("\n") >= 2 + len(findings)
    # Section host reports differences of two runs: where the machine is busy, these can be below 0.
    assert all(finding["antiphon"] >= 0 for finding in findings if finding["name"] != "host")
    return findings


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a tiny random model: bundle and checkpoint."""
    folder = tmp_path_factory.mktemp("random_model") / "random"
    command = (sys.executable, "-m", "antiphon.tools.bench.make_models", "random", "tiny", str(folder))
    subprocess.run(command, check=True, timeout=PATIENCE_S, env=environment())
    return folder


@pytest.mark.parametrize(
    ("section", "cases"),
    [
        ("engine", {("tokens/s", True), ("tokens/CPU s", True)}),
        ("growth", {("tokens/s", False)}),
        ("graphs", {("us", True)}),
        ("host", {("us of CPU", False)}),
        ("grpc_overhead", {("tokens/s", True), ("us of CPU a request", True)}),
        ("stages", {("us of CPU a request", True), ("us of CPU a request", False)}),
        ("one_user", {("ms", False)}),
        ("startup", {("s", False), ("MB", False)}),
    ],
)
def test_section_without_ctranslate2_reports_figures(
    bundle: Path, tmp_path: Path, texts: tuple[str, ...], section: str, cases: set[tuple[str, bool]]
) -> None:
    arguments = (str(bundle), "--section", section, "--model", "bundle", "--rows", "4", *texts)
    findings = findings_of(tmp_path, arguments)
    assert {finding["name"] for finding in findings} == {section}
    assert {(finding["unit"], finding["baseline"] is not None) for finding in findings} == cases
    assert all(finding["ctranslate2"] is None for finding in findings)
    assert all(finding["ratio"] > 0 for finding in findings if finding["baseline"] is not None)


def test_steps_of_recurrences_are_measured_beside_self_attention(tmp_path: Path) -> None:
    findings = findings_of(tmp_path, ("--section", "positions", "--preset", "tiny", "--rows", "2"))
    assert [finding["unit"] for finding in findings] == ["us", "KiB"] * 6
    for kind in ("ssru", "average"):
        caches = [finding for finding in findings if finding["case"].startswith(f"{kind}, cache")]
        assert len({finding["antiphon"] for finding in caches}) == 1  # two states, whatever the length
        assert caches[0]["baseline"] < caches[1]["baseline"] < caches[2]["baseline"]


def beside_ctranslate2(random_model: Path, *flags: str) -> tuple[str, ...]:
    """Return arguments to compare the bundle with CTranslate2. The first test converts it, the others reuse it."""
    models = ("--model", "bundle", "--work", str(random_model.parent / "work"))
    return (str(random_model / "bundle"), *models, *flags)


def test_decoding_speed_is_measured_beside_ctranslate2_on_the_same_work(
    random_model: Path, tmp_path: Path, texts: tuple[str, ...]
) -> None:
    plot, profile = tmp_path / "decode.png", tmp_path / "profile.txt"
    flags = ("--section", "decode", "--rows", "8", "--plot", str(plot), "--profile", str(profile))
    findings = findings_of(tmp_path, beside_ctranslate2(random_model, *flags, *texts))
    assert [(finding["name"], finding["rows"], finding["unit"]) for finding in findings] == [
        ("decode", 8, "tokens/s"),
        ("decode", 8, "BLEU"),
    ]
    assert all(finding["ctranslate2"] is not None for finding in findings)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "decoder, 8 rows" in profile.read_text(encoding="utf-8")


def test_encoding_speed_is_measured_beside_ctranslate2_on_the_same_work(
    random_model: Path, tmp_path: Path, texts: tuple[str, ...]
) -> None:
    (finding,) = findings_of(tmp_path, beside_ctranslate2(random_model, "--section", "encode", *texts))
    assert (finding["name"], finding["rows"], finding["unit"]) == ("encode", 64, "source tokens/s")
    assert finding["ctranslate2"] is not None
    assert finding["equal_outputs"] > 0


def test_waits_and_memory_are_beside_ctranslate2(random_model: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    sections = ("--section", "poisson", "memory", "clients")
    findings = findings_of(tmp_path, beside_ctranslate2(random_model, *sections, *texts))
    units = [(finding["name"], finding["unit"]) for finding in findings]
    expected = [("poisson", "requests/s"), *[("poisson", "ms")] * 6, *[("memory", "MB")] * 2, ("clients", "tokens/s")]
    assert units == expected
    assert all(finding["ctranslate2"] is not None for finding in findings)


def test_bundle_is_compared_with_a_checkpoint(random_model: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    flags = ("--checkpoint", str(random_model / "checkpoint"), "--section", "encode", *texts)
    (finding,) = findings_of(tmp_path, (str(random_model / "bundle"), "--model", "bundle", *flags))
    assert finding["ctranslate2"] is not None


def test_checkpoint_is_read_in_place_of_the_bundle_when_it_is_given(random_model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(random_model / "checkpoint", damaged)
    (damaged / "model.safetensors").write_bytes(b"")
    flags = ("--model", "bundle", "--section", "encode", "--checkpoint", str(damaged))
    ended = antiphon("bench", str(random_model / "bundle"), *flags, *SMALL)
    assert ended.returncode == 2
    assert f"the ctranslate2 model of {damaged} cannot be made".encode() in ended.stderr


def test_random_model_is_reused_and_its_targets_never_end(random_model: Path, tmp_path: Path) -> None:
    """The section itself checks the number of tokens of both sides."""
    setup = Setup(
        bundle=load_bundle(random_model / "bundle"), corpus=everyday(), models=("random",), work=tmp_path,
        preset="tiny", threads=1, repeat=1,
    )  # fmt: skip
    shutil.copytree(random_model, setup.random_folder)
    findings = findings_of(
        tmp_path,
        ("--section", "decode", "--model", "random", "--preset", "tiny", "--rows", "4", "--work", str(tmp_path)),
    )
    assert [(finding["rows"], finding["unit"]) for finding in findings] == [(4, "tokens/s")]
    assert (setup.random_folder / "ctranslate2").is_dir()


def test_checkpoint_is_refused_when_it_belongs_to_another_model(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"")
    ended: subprocess.CompletedProcess[bytes] = antiphon(
        "bench", str(bundle), "--section", "decode", "--model", "bundle", "--checkpoint", str(tmp_path)
    )
    assert ended.returncode == 2
    assert b"--checkpoint" in ended.stderr
    assert b"is not that of the bundle" in ended.stderr
