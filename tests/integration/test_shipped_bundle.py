"""The bundles in the repository: English-German, which new users run first, and German-English."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from antiphon.bundle.manifest import Bundle, load_bundle
from antiphon.cli.main import main
from antiphon.runtime.lanes import open_runner
from antiphon.server.settings import ServerConfig
from antiphon.text.tokenizer import Tokenizer
from antiphon.tools.evaluation.translations import run_engine
from antiphon.training.recipe import load_recipe

ROOT = Path(__file__).parents[2]
BUNDLES = ROOT / "model" / "antiphon" / "bundles"
BUNDLE = BUNDLES / "en-de"
DATA = os.environ.get("ANTIPHON_DATA")
SENTENCES = [
    "How are you?", "I don't know.", "The weather is nice today.", "Where is the station?", "He has three dogs.",
    "My sister wants to learn German because she likes the language.", "Stop!", "Can you help me with this, please?",
    "We were very tired after the long journey, so we went to bed early.", "Tom isn't here.", "It's raining.",
]  # fmt: skip


GERMAN = [
    "Wie geht es dir?", "Ich weiß nicht.", "Das Wetter ist heute schön.", "Wo ist der Bahnhof?", "Er hat drei Hunde.",
    "Meine Schwester möchte Deutsch lernen, weil sie die Sprache mag.", "Halt!", "Können Sie mir bitte dabei helfen?",
    "Wir waren nach der langen Reise sehr müde und gingen früh zu Bett.", "Tom ist nicht hier.", "Es regnet.",
]  # fmt: skip


@pytest.fixture(scope="module", params=["en-de", "de-en"])
def bundle(request: pytest.FixtureRequest) -> Bundle:
    return load_bundle(BUNDLES / request.param)


def test_shipped_bundle_is_served_by_the_default_configuration() -> None:
    assert ServerConfig().bundle.resolve() == BUNDLE.resolve()


def test_shipped_bundles_are_small() -> None:
    sizes = {folder.name: sum(path.stat().st_size for path in folder.iterdir()) for folder in BUNDLES.iterdir()}
    assert set(sizes) == {"en-de", "de-en"}
    assert sizes["en-de"] <= 20e6
    assert sum(sizes.values()) <= 30e6


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


def test_translations_in_the_documents_are_the_answers_of_the_bundle(bundle: Bundle) -> None:
    file, head = {
        "en-de": ("README.md", "| English | German |"),
        "de-en": ("model/antiphon/training/recipes/open-de-en.md", "| German | English |"),
    }[bundle.manifest.name]
    text = (ROOT / file).read_text(encoding="utf-8")
    table = text[text.index(head) :].split("\n\n")[0].splitlines()[2:]
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
    texts = SENTENCES if bundle.manifest.name == "en-de" else GERMAN
    sources = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]

    def answers(rows: int, threads: int) -> list[list[int]]:
        return asyncio.run(run_engine(open_runner(bundle, max_rows=rows, threads=threads), sources))

    alone = answers(rows=1, threads=1)
    assert alone == answers(rows=len(sources), threads=1) == answers(rows=4, threads=2)
    assert len({tuple(ids) for ids in alone}) == len(texts)


@pytest.mark.combinations
@pytest.mark.skipif(DATA is None, reason="ANTIPHON_DATA does not name a folder with the held-out sentences")
def test_shipped_bundle_translates_held_out_sentences(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    """The bound is far below the documented score, and far above that of a broken export or tokenizer."""
    arguments = ["--data", str(DATA), "--part", "valid", "--json"]
    chosen = {"en-de": ["--recipe", "tatoeba-en-de"], "de-en": ["--recipe", "open-de-en", "--collection", "tatoeba"]}
    assert main(["evaluate", str(bundle.path), *chosen[bundle.manifest.name], *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["bleu"] > 20
