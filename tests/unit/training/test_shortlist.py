"""Learning of a lexical shortlist: IBM model 1 beside its formulas, a known dictionary, and what the command writes."""

from __future__ import annotations

import random
import re
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from antiphon.bundle.manifest import load_bundle
from antiphon.checkpoints.checkpoint import load_checkpoint, save_checkpoint, weights_of
from antiphon.cli.main import main
from antiphon.export.export import export_bundle
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.text.shortlist import Shortlist
from antiphon.text.tokenizer import open_tokenizer
from antiphon.training import shortlist as module
from antiphon.training.corpus import load_corpus
from antiphon.training.recipe import Recipe, TrainConfig
from antiphon.training.shortlist import TokenPair, learn_lexicon, shortlist_of
from tests.pair_collections import collections, pairs_of
from tests.parity.exports import small_config, write_checkpoint
from tests.recipe_files import write_recipe

NUM_SOURCES, NUM_TARGETS = 9, 11


def model_1(pairs: list[TokenPair], iterations: int) -> dict[tuple[int | None, int], float]:
    """Return t(e|f) of IBM model 1 as Brown et al. 1993, section 4.1 define it; None is the empty word."""
    probability: dict[tuple[int | None, int], float] = defaultdict(lambda: 1 / NUM_TARGETS)
    for _ in range(iterations):
        counts: dict[tuple[int | None, int], float] = defaultdict(float)
        totals: dict[int | None, float] = defaultdict(float)
        for source, target in pairs:
            words = [None, *source]
            for e in target:
                total = sum(probability[f, e] for f in words)
                for f in words:
                    counts[f, e] += probability[f, e] / total
                    totals[f] += probability[f, e] / total
        probability = defaultdict(float, {(f, e): count / totals[f] for (f, e), count in counts.items()})
    return probability


@pytest.mark.parametrize("part_links", [1, 40, 1 << 22])
@pytest.mark.parametrize("iterations", [1, 4])
def test_lexicon_has_the_probabilities_of_ibm_model_1(
    monkeypatch: pytest.MonkeyPatch, part_links: int, iterations: int
) -> None:
    monkeypatch.setattr(module, "_PART_LINKS", part_links)
    dice = random.Random(3)
    pairs: list[TokenPair] = [
        (dice.choices(range(NUM_SOURCES), k=dice.randint(1, 6)), dice.choices(range(NUM_TARGETS), k=dice.randint(1, 6)))
        for _ in range(25)
    ]
    lexicon = learn_lexicon(pairs, num_sources=NUM_SOURCES, num_targets=NUM_TARGETS, iterations=iterations)
    expected = {pair: value for pair, value in model_1(pairs, iterations).items() if pair[0] is not None}
    found = zip(lexicon.sources.tolist(), lexicon.targets.tolist(), strict=True)
    assert dict(zip(found, lexicon.probabilities.tolist(), strict=True)) == pytest.approx(expected, rel=1e-9)


def test_lexicon_finds_the_dictionary_of_an_artificial_language() -> None:
    """Targets have another order than their sources, a frequent word without source, and some wrong words."""
    dice = random.Random(7)
    num_words = 40
    dictionary = dice.sample(range(num_words), num_words)
    pairs: list[TokenPair] = []
    for _ in range(600):
        source = dice.choices(range(num_words), k=dice.randint(3, 9))
        target = [dictionary[word] if dice.random() < 0.9 else dice.randrange(num_words) for word in source]
        pairs.append((source, dice.sample([*target, num_words], len(target) + 1)))
    lexicon = learn_lexicon(pairs, num_sources=num_words, num_targets=num_words + 1, iterations=5)
    best = shortlist_of(lexicon, num_best=1, num_sources=num_words, always=[num_words], has_source_ids=False)
    assert best.target_ids.tolist() == dictionary
    assert best.offsets.tolist() == list(range(num_words + 1))


@pytest.mark.parametrize("num_best", [1, 3, 50])
def test_shortlist_keeps_the_most_likely_tokens_of_each_source_token(num_best: int) -> None:
    dice = np.random.default_rng(2)
    drawn = sorted({(int(f), int(e)) for f, e in dice.integers(0, (NUM_SOURCES, NUM_TARGETS), (60, 2))})
    weights = dice.permutation(len(drawn)).astype(np.float64)
    lexicon = module.Lexicon(np.array([f for f, _ in drawn]), np.array([e for _, e in drawn]), weights)
    found = shortlist_of(lexicon, num_best=num_best, num_sources=NUM_SOURCES, always=[10, 2], has_source_ids=False)
    for source in range(NUM_SOURCES):
        own = sorted((-weight, e) for (f, e), weight in zip(drawn, weights, strict=True) if f == source)
        assert set(found.candidates([source]).tolist()) == {2, 10, *(e for _, e in own[:num_best])}


ENGLISH = ["The dog sleeps.", "The cat sleeps.", "The dog eats.", "The cat eats.", "A small house."] * 30
GERMAN = ["Der Hund schläft.", "Die Katze schläft.", "Der Hund frisst.", "Die Katze frisst.", "Ein Häuschen."] * 30


def texts(folder: Path, sources: list[str] = ENGLISH, references: list[str] = GERMAN) -> list[str]:
    (folder / "train.en").write_text("\n".join([*sources, ""]), encoding="utf-8")
    (folder / "train.de").write_text("\n".join([*references, ""]), encoding="utf-8")
    return ["--source", str(folder / "train.en"), "--reference", str(folder / "train.de")]


def read_shortlist(folder: Path) -> Shortlist:
    manifest = load_bundle(folder).manifest
    assert manifest.text.shortlist is not None
    sizes = {"num_sources": manifest.model.resolved_source_vocab_size, "num_targets": manifest.model.vocab_size}
    return Shortlist.read(folder / manifest.text.shortlist, **sizes)


def test_command_writes_the_shortlist_into_a_bundle_and_replaces_an_older_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(SHIPPED_BUNDLE, bundle)
    before = load_bundle(bundle).manifest
    options = ["shortlist", str(bundle), *texts(tmp_path), "--best", "4"]
    assert main([*options, "--frequent", "3"]) == 0
    printed = capsys.readouterr().out
    assert "candidates of 7 other sources: " in printed
    assert "100.00 % of the references'" in printed
    first = load_bundle(bundle).manifest.text.shortlist
    learned = read_shortlist(bundle)
    assert len(learned.always) == 4
    assert before.model.eos_id in learned.always
    assert learned.has_source_ids
    tokenizer = open_tokenizer(bundle, before.text)
    cat, dog = (set(learned.candidates(tokenizer.encode(word)).tolist()) for word in ("The cat", "The dog"))
    assert {*tokenizer.encode_target("Die Katze"), *tokenizer.encode("The cat")} <= cat
    assert not {*tokenizer.encode_target("Die Katze")} <= dog

    assert main([*options, "--frequent", "5"]) == 0
    after = load_bundle(bundle).manifest
    assert after.text.shortlist != first
    assert sorted(path.name for path in bundle.iterdir()) == sorted({"manifest.json", *after.files})
    assert set(after.files) == {*before.files, after.text.shortlist}
    assert after.model_copy(update={"text": before.text, "files": before.files}) == before


def test_pairs_of_a_recipe_are_those_of_its_training_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = collections(tmp_path, {"one": pairs_of("first", 300), "two": pairs_of("second", 200)})
    described: dict[str, object] = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 4, "d_ff": 64}
    recipe = Recipe(name="two", data=data, vocab_size=300, model=described, train=TrainConfig())
    folders = [tmp_path / "recipe", tmp_path / "files"]
    for folder in folders:
        shutil.copytree(SHIPPED_BUNDLE, folder)
    flags = ["--recipe", write_recipe(recipe, tmp_path / "two.toml"), "--data", str(tmp_path), "--collection", "two"]
    assert main(["shortlist", str(folders[0]), *flags]) == 0
    sources, references = zip(*load_corpus(data, tmp_path, ["two"]).train, strict=True)
    for name, lines in (("en", sources), ("de", references)):
        (tmp_path / name).write_text("\n".join(lines))
    assert (
        main(["shortlist", str(folders[1]), "--source", str(tmp_path / "en"), "--reference", str(tmp_path / "de")]) == 0
    )
    names = [load_bundle(folder).manifest.text.shortlist for folder in folders]
    assert names[0] == names[1]  # with a part of the SHA-256
    capsys.readouterr()
    assert main(["shortlist", str(folders[0]), "--source", str(tmp_path / "en")]) == 2
    assert "give --source with --reference, or --recipe with --data" in capsys.readouterr().err


def test_shortlist_of_a_checkpoint_is_exported_and_stays_in_copies(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", small_config())
    words = [f"the small word number {number} is here again" for number in range(50)]
    assert main(["shortlist", str(tmp_path / "checkpoint"), *texts(tmp_path, words, words), "--frequent", "2"]) == 0
    learned = load_checkpoint(tmp_path / "checkpoint")
    assert learned.text.model_copy(update={"shortlist": None}) == checkpoint.text
    save_checkpoint(
        tmp_path / "copy",
        config=learned.config,
        weights=weights_of(learned.model),
        tokenizer=learned.tokenizer,
        text=learned.text,
        text_folder=learned.text_folder,
    )
    export_bundle(load_checkpoint(tmp_path / "copy"), tmp_path / "bundle", precisions=("float32",), explain=False)
    word = learned.tokenizer.encode("word")
    assert set(word) <= set(read_shortlist(tmp_path / "bundle").candidates(word).tolist())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--best", "0"], "--best is 0; it must be at least 1"),
        (["--frequent", "-1"], "--frequent is -1; it must be at least 1"),
        (["--iterations", "0"], "--iterations is 0; it must be at least 1"),
        (["--pairs", "0"], "--pairs is 0; it must be at least 1"),
    ],
)
def test_option_out_of_range_is_refused_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["shortlist", str(SHIPPED_BUNDLE), *texts(tmp_path), *options]) == 2
    assert capsys.readouterr().err == f"antiphon shortlist: {message}\n"


@pytest.mark.parametrize(
    ("sources", "references", "message"),
    [
        (["a", "b"], ["a"], "has 3 lines, .* has 2; they must be equal"),
        (["", "word " * 300], ["a", "b"], "have no pair of 1 to 256 tokens a side"),
    ],
)
def test_texts_without_pairs_are_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sources: list[str],
    references: list[str],
    message: str,
) -> None:
    assert main(["shortlist", str(SHIPPED_BUNDLE), *texts(tmp_path, sources, references)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_model_without_targets_and_folder_without_model_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path / "decoder", small_config(architecture="decoder", encoder_layers=0))
    assert main(["shortlist", str(tmp_path / "decoder"), *texts(tmp_path)]) == 2
    assert "is decoder-only; a shortlist is of a model with sources and targets" in capsys.readouterr().err
    assert main(["shortlist", str(tmp_path), *texts(tmp_path)]) == 2
    assert "is not a checkpoint: config.json is missing" in capsys.readouterr().err
