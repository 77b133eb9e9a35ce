"""Section `rivals` of `antiphon bench`: the programs themselves, in environments that a test has already made."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration

from antiphon.bundle.manifest import Bundle, load_bundle
from antiphon.importer.importer import ImportOptions, import_checkpoint
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.tools.bench import rival_programs
from antiphon.tools.bench.corpus import Corpus
from antiphon.tools.bench.report import BenchError, BenchFailure
from antiphon.tools.bench.rivals import OF_MARIAN, Rival, python_of, rivals, running
from antiphon.tools.bench.setup import Setup
from antiphon.tools.offline import Offline
from tests.real_weights import firefox_model, unpacked

PAD, END = 1, 2


def bart() -> Any:
    """Return a model whose targets end after different numbers of tokens."""
    torch.manual_seed(1)
    config = BartConfig(
        vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, init_std=1.0,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64,
        pad_token_id=PAD, eos_token_id=END, decoder_start_token_id=END, forced_eos_token_id=None,
    )  # fmt: skip
    model: Any = BartForConditionalGeneration(config)
    model.eval()
    model.final_logits_bias[0, END] = 8.0
    return model


@pytest.mark.parametrize("is_endless", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_program_of_transformers_answers_each_source_in_its_place(rows: int, *, is_endless: bool) -> None:
    model, dice = bart(), torch.Generator().manual_seed(3)
    sources = [torch.randint(3, 40, (length,), generator=dice).tolist() for length in (5, 2, 9, 7, 2, 12, 3)]
    request = {"sources": sources, "rows": rows, "max_new_tokens": 12, "is_endless": is_endless}
    found = rival_programs.generation(model)(request)
    for source, target in zip(sources, found, strict=True):
        ids, least = torch.tensor([source]), 12 if is_endless else None
        (alone,) = model.generate(input_ids=ids, num_beams=1, do_sample=False, max_new_tokens=12, min_new_tokens=least)
        assert target == alone[1:].tolist()
    lengths = {len(target) for target in found}
    assert (lengths == {12}) if is_endless else len(lengths) > 1


def made_environment(rival: Rival, work: Path) -> None:
    """Make the environment of a rival whose package `make real-weights` has unpacked. Skips the test without it."""
    base = sys.executable if rival.python is None else shutil.which(f"python{rival.python}")
    if base is None:
        pytest.skip(f"{rival.name} needs python{rival.python}, which PATH does not have")
    python = python_of(rival, work)
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{unpacked(rival.name)}" exec {base} "$@"\n', encoding="utf-8")
    python.chmod(0o755)


def setup_of(bundle: Bundle, checkpoint: Path, work: Path) -> Setup:
    corpus = Corpus(texts=("The weather is fine today.", "Where is the station?", "She reads a book."))
    return Setup(
        bundle=bundle, corpus=corpus, models=("bundle",), work=work, checkpoint=checkpoint, rows=(1, 4), threads=2,
        repeat=1, lanes=1,
    )  # fmt: skip


@pytest.mark.combinations
def test_marian_model_is_measured_beside_the_programs_that_read_it(tmp_path: Path) -> None:
    for rival in OF_MARIAN:
        made_environment(rival, tmp_path)
    source = firefox_model("enpt")
    options = ImportOptions(
        source=str(source), target=tmp_path / "bundle", precisions=("float32",), verify=False, explain=False
    )
    findings = rivals(setup_of(import_checkpoint(options), source, tmp_path))
    assert [(finding.rows, finding.against) for finding in findings] == [
        (rows, rival.name) for rows in (1, 4) for _ in ("full vocabulary", "shortlist") for rival in OF_MARIAN
    ]
    assert {finding.unit for finding in findings} == {"sentences/s"}
    # Marian computes in float32, as the bundle does; fxtranslate in int8.
    assert {finding.equal_outputs for finding in findings if finding.against == "pymarian"} == {1.0}
    # fxtranslate, in int8, answers each sentence alone: one process or two give the same texts, in the same places.
    alone, shared = (
        {
            finding.case: finding.equal_outputs
            for finding in findings
            if (finding.rows, finding.against) == (rows, "fxtranslate")
        }
        for rows in (1, 4)
    )
    assert alone == shared
    assert any(alone.values())
    assert all(finding.antiphon > 0 and finding.baseline for finding in findings)


@pytest.mark.combinations
def test_targets_of_the_random_model_have_one_length_on_both_sides(tmp_path: Path) -> None:
    setup = replace(setup_of(load_bundle(SHIPPED_BUNDLE), tmp_path, tmp_path), preset="tiny")
    subject, folder = setup.random_of_transformers
    sources, longest = subject.sources(3), subject.max_new_tokens
    with Offline(*setup.runners(subject, 2), rows=2) as offline:
        ours = offline.translate(sources, concurrency=3, max_new_tokens=longest, ignore_eos=True)
    model: Any = BartForConditionalGeneration.from_pretrained(folder)
    request = {"sources": sources, "rows": 2, "max_new_tokens": longest, "is_endless": True}
    theirs = rival_programs.generation(model)(request)
    assert {len(target) for target in (*ours, *theirs)} == {longest}


def test_directory_that_no_rival_reads_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=f"--checkpoint {tmp_path}: neither config.json of transformers nor .* Marian"):
        rivals(setup_of(load_bundle(SHIPPED_BUNDLE), tmp_path, tmp_path / "work"))


def test_bundle_without_its_origin_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup = replace(setup_of(load_bundle(SHIPPED_BUNDLE), tmp_path, tmp_path), checkpoint=None)
    assert rivals(setup) == []
    assert "en-de is not compared with rivals: --checkpoint names" in capsys.readouterr().err


def test_python_that_a_rival_needs_is_named(tmp_path: Path) -> None:
    rival = Rival("Future", "pymarian", ("pymarian",), python="9.9")
    with pytest.raises(BenchError, match=r"Future needs python9\.9"), running(rival, tmp_path, ()):
        pass


def test_environment_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    rival = Rival("Nothing", "pymarian", (str(tmp_path / "missing.whl"),))
    with pytest.raises(BenchError, match=r"pip install failed: .*missing\.whl"), running(rival, tmp_path, ()):
        pass
    assert list(tmp_path.iterdir()) == []


def test_reason_of_a_program_that_ends_is_given(tmp_path: Path) -> None:
    rival = Rival("fxtranslate", "fxtranslate", ())
    made_environment(rival, tmp_path)
    with (
        pytest.raises(BenchFailure, match=r"fxtranslate ended: FileNotFoundError.*missing\.spm"),
        running(rival, tmp_path, ("model", str(tmp_path / "missing.spm"), "shortlist")),
    ):
        pass
