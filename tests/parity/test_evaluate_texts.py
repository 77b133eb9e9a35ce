"""`antiphon evaluate --text`: perplexity is exp of transformers' loss of the same model on the same text."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from antiphon.bundle.manifest import load_bundle, write_manifest
from antiphon.cli.main import main
from antiphon.importer.importer import ImportOptions, import_checkpoint
from tests.parity.decoder_checkpoints import SIZES, write_decoder

LONGEST = int(str(SIZES["max_position_embeddings"]))
LONG = " ".join(["a cold morning in the small town"] * 20)
TEXTS = ["the cat sat on the mat", "", LONG, "eine kühle Brücke", "   ", "a", "the small cat over the mat"]


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Model of a checkpoint in transformers, and its bundle."""

    theirs: Any
    tokenizer: Any
    bundle: Path


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write_decoder(folder / "checkpoint", request.param)
    import_checkpoint(ImportOptions(source=str(folder / "checkpoint"), target=folder / "bundle", explain=False))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "checkpoint")
    return Imported(theirs=theirs, tokenizer=tokenizer, bundle=folder / "bundle")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{line}\n" for line in TEXTS), encoding="utf-8")
    return path


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict[str, Any]]:
    assert main(["evaluate", *map(str, arguments), "--threads", "1", "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def loss_of(theirs: Any, ids: list[int]) -> tuple[float, int]:
    """Return the negative log-likelihood of all tokens but the first, and their number. Windows share one token."""
    total, count = 0.0, 0
    while len(ids) > 1:
        window = torch.tensor([ids[:LONGEST]])
        with torch.no_grad():
            total += theirs(window, labels=window).loss.item() * (window.shape[1] - 1)
        count += window.shape[1] - 1
        ids = ids[LONGEST - 1 :]
    return total, count


def test_perplexity_is_exp_of_the_loss_of_transformers(
    imported: Imported, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    encoded = [imported.tokenizer(line)["input_ids"] for line in TEXTS if line.strip()]
    assert max(map(len, encoded)) > 2 * LONGEST
    losses = [loss_of(imported.theirs, ids) for ids in encoded]
    num_tokens = sum(count for _, count in losses)
    (score,) = evaluate(capsys, imported.bundle, "--text", text, "--precision", "float32")
    assert score["perplexity"] == pytest.approx(math.exp(sum(total for total, _ in losses) / num_tokens), rel=1e-4)
    num_texts = sum(len(ids) > 1 for ids in encoded)  # a letter is one token of GPT-2, without a begin token
    assert (score["tokens"], score["texts"], score["skipped"]) == (num_tokens, num_texts, len(TEXTS) - num_texts)


@pytest.mark.combinations
def test_loss_per_byte_and_per_character_counts_the_text_of_the_scored_tokens(
    imported: Imported, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2 has no begin token, so the first token is not scored. Llama's word mark before a text is a space."""
    encoded = [imported.tokenizer(line)["input_ids"] for line in TEXTS if line.strip()]
    decoded = [imported.tokenizer.decode(ids[1:], skip_special_tokens=True) for ids in encoded if len(ids) > 1]
    marks = len(decoded) if imported.theirs.config.model_type == "llama" else 0
    (score,) = evaluate(capsys, imported.bundle, "--text", text, "--precision", "float32")
    nats = math.log(score["perplexity"]) * score["tokens"]
    assert score["nats_per_character"] == pytest.approx(nats / (sum(map(len, decoded)) + marks))
    num_bytes = sum(len(line.encode()) for line in decoded) + marks
    assert score["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes)
    assert num_bytes > sum(map(len, decoded)) + marks


@pytest.mark.combinations
def test_recorded_perplexity_equals_the_score_of_each_precision(
    imported: Imported, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(imported.bundle, tmp_path / "copy"))
    before = load_bundle(copy).manifest
    for _ in range(2):  # the second run replaces the values of the first
        evaluate(capsys, copy, "--text", text, "--record")
    after = load_bundle(copy).manifest
    assert after.model_copy(update={"quality": ()}) == before
    precisions = ("float32", "int8")
    alone = {p: evaluate(capsys, copy, "--text", text, "--precision", p)[0]["perplexity"] for p in precisions}
    assert {held.precision: held.value for held in after.quality} == alone
    assert alone["int8"] != alone["float32"]
    for held in after.quality:
        assert (held.measure, held.float32, held.file) == ("perplexity", alone["float32"], "texts.txt")
        assert held.sha256 == hashlib.sha256(text.read_bytes()).hexdigest()


@pytest.mark.combinations
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "/nowhere/a"], "/nowhere/a cannot be read"),
        (
            ["--text", __file__, "--source", __file__],
            "--text measures decoder-only and encoder-only models; leave out --source",
        ),
        (["--text", __file__, "--record", "--precision", "int8"], "leave out --precision"),
        (["--text", "/dev/null"], "/dev/null: none of 1 lines has 2 tokens"),
        (
            ["--source", __file__, "--reference", __file__, "--record"],
            "does not translate; for it --record needs --text",
        ),
    ],
)
def test_wrong_argument_is_named(
    imported: Imported, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(imported.bundle), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.combinations
def test_bundle_without_float32_graphs_is_not_recorded(
    imported: Imported, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(imported.bundle, tmp_path / "copy"))
    manifest = load_bundle(copy).manifest
    kept = tuple(graphs for graphs in manifest.graphs if graphs.precision == "int8")
    write_manifest(copy, manifest.model_copy(update={"graphs": kept}))
    assert main(["evaluate", str(copy), "--text", str(text), "--record"]) == 2
    assert "has no float32 graphs to compare with" in capsys.readouterr().err
    assert not load_bundle(copy).manifest.quality


@pytest.mark.combinations
def test_profile_reports_that_it_measures_only_encoders(imported: Imported, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(imported.bundle)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"antiphon profile: {imported.bundle} is decoder-only; only encoders are measured"
