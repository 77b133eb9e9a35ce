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
from antiphon.model.training.recipe import load_recipe
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


def test_shipped_bundle_is_small() -> None:
    assert sum(path.stat().st_size for path in BUNDLE.iterdir()) <= 20e6


def test_notice_lists_every_source_of_the_recipe(bundle: Bundle) -> None:
    provenance = bundle.manifest.provenance
    assert provenance is not None
    assert provenance.recipe is not None
    collections = load_recipe(provenance.recipe).data.collections
    lines = [line for line in bundle.file("NOTICE").read_text(encoding="utf-8").splitlines() if line.startswith("- ")]
    assert [line[2 : line.index(":")] for line in lines] == [collection.name for collection in collections]
    for line, collection in zip(lines, collections, strict=True):
        assert line.endswith(f": {collection.origin}. {collection.licence}. {collection.attribution}")
        assert collection.licence in provenance.licence


def test_translations_in_the_readme_are_the_answers_of_the_bundle(bundle: Bundle) -> None:
    readme = (BUNDLE.parents[2] / "README.md").read_text(encoding="utf-8")
    table = readme[readme.index("| English | German |") :].split("\n\n")[0].splitlines()[2:]
    shown = dict(row.strip("| ").split(" | ") for row in table)
    assert len(shown) == 10
    tokenizer = Tokenizer.load(bundle.file("tokenizer.json"))
    sources = [[*tokenizer.encode(text), tokenizer.eos_id] for text in shown]
    answers = asyncio.run(run_engine(open_runner(bundle, max_rows=len(sources), threads=2), sources))
    assert [tokenizer.decode(ids) for ids in answers] == list(shown.values())


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
