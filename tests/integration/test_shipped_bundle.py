"""The bundle in the repository, which new users run first."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from antiphon.cli.main import main
from antiphon.model.bundle.manifest import Bundle, load_bundle
from antiphon.model.text.tokenizer import Tokenizer
from antiphon.service.runtime.runners import open_runner
from antiphon.service.server.settings import ServerConfig
from antiphon.service.tools.evaluation.evaluate_translations import run_engine

BUNDLE = Path(__file__).parents[2] / "model" / "bundles" / "en-de"
DATA = os.environ.get("ANTIPHON_DATA")
SENTENCES = [
    "How are you?", "I don't know.", "The weather is nice today.", "Where is the station?", "He has three dogs.",
    "My sister wants to learn German because she likes the language.", "Stop!", "Can you help me with this, please?",
    "We were very tired after the long journey, so we went to bed early.", "Tom isn't here.", "It's raining.",
]  # fmt: skip


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return load_bundle(BUNDLE)


def test_shipped_bundle_is_served_by_the_default_configuration() -> None:
    assert ServerConfig().bundle.resolve() == BUNDLE.resolve()


def test_shipped_bundle_is_small_and_names_the_source_of_its_training_data(bundle: Bundle) -> None:
    assert sum(path.stat().st_size for path in BUNDLE.iterdir()) <= 15e6
    provenance = bundle.manifest.provenance
    assert provenance is not None
    assert provenance.licence == "CC BY 2.0"
    notice = bundle.file("NOTICE").read_text(encoding="utf-8")
    assert "tatoeba.org" in notice
    assert "CC BY 2.0" in notice


def test_profile_of_the_shipped_bundle_has_no_quadratic_term(bundle: Bundle) -> None:
    memory = bundle.manifest.memory
    assert memory is not None
    fit = memory.fits["native-int8"]
    assert fit.c == pytest.approx(0, abs=0.01)
    assert fit.exponent == pytest.approx(1.0, abs=0.1)
    assert fit.residual < 0.1


def test_answers_of_the_shipped_bundle_are_equal_alone_and_in_a_crowd(bundle: Bundle) -> None:
    tokenizer = Tokenizer.load(bundle.file("tokenizer.json"))
    sources = [[*tokenizer.encode(text), tokenizer.eos_id] for text in SENTENCES]

    def answers(rows: int, threads: int) -> list[list[int]]:
        return asyncio.run(run_engine(open_runner(bundle, max_rows=rows, threads=threads), sources))

    alone = answers(rows=1, threads=1)
    assert alone == answers(rows=len(sources), threads=1) == answers(rows=4, threads=2)
    assert len({tuple(ids) for ids in alone}) == len(SENTENCES)


@pytest.mark.skipif(DATA is None, reason="ANTIPHON_DATA does not name a folder with the held-out sentences")
def test_shipped_bundle_translates_held_out_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    """The bound is far below the README's score, and far above that of a broken export or tokenizer."""
    arguments = ["--recipe", "tatoeba-en-de", "--data", str(DATA), "--part", "valid", "--json"]
    assert main(["evaluate", str(BUNDLE), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["bleu"] > 20
