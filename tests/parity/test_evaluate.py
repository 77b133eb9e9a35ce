"""`antiphon evaluate`: three systems with the same weights give equal outputs, and scores are sacreBLEU's."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import sacrebleu

from antiphon.bundle.manifest import Bundle, load_bundle, write_manifest
from antiphon.checkpoints.checkpoint import Checkpoint
from antiphon.cli.main import main
from antiphon.client import Client, Generation, Options, ServerError
from antiphon.export.export import export_bundle
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.training.corpus import load_collections
from antiphon.training.recipe import Recipe, TrainConfig
from tests.integration.process import ServerProcess
from tests.pair_collections import collections, pairs_of
from tests.recipe_files import write_recipe

SOURCES = ["one two three", "a longer line, with more of it", "x", "völlig anders", "one two three"]
REFERENCES = ["eins zwei drei", "eine längere Zeile", "x", "something else", "eins zwei"]

ENGLISH = [
    "I would like to book a table for two people tonight, please.",
    "The government announced on Tuesday that it would change the rules for small companies.",
    "How are you?",
    "I have never seen such rain before, have you?",
    "Nobody in the village remembered who had built the old stone bridge.",
]


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, lines in (("source", SOURCES), ("reference", REFERENCES)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return ["--source", str(tmp_path / "source"), "--reference", str(tmp_path / "reference")]


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert main(["evaluate", *arguments, "--threads", "1", "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_engine_pytorch_and_ctranslate2_give_equal_translations(
    bundle: Bundle, checkpoint: Checkpoint, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = [tmp_path / name for name in ("engine", "pytorch")]
    (engine,) = evaluate(capsys, str(bundle.path), *files, "--precision", "float32", "--output", str(outputs[0]))
    folder = str(checkpoint.text_folder)
    pytorch, float32, _ = evaluate(capsys, folder, *files, "--ctranslate2", "--output", str(outputs[1]))
    assert outputs[0].read_text() == outputs[1].read_text()
    assert engine["chrf"] == pytorch["chrf"] == float32["chrf"]
    hypotheses = outputs[0].read_text(encoding="utf-8").split("\n")[:-1]
    assert engine["chrf"] == round(sacrebleu.corpus_chrf(hypotheses, [REFERENCES]).score, 2)
    assert engine["bleu"] == round(sacrebleu.corpus_bleu(hypotheses, [REFERENCES]).score, 2)
    assert engine["equal"] == 0.0
    (tmp_path / "half").write_text("".join(f"{line}\n" for line in (*hypotheses[:3], "x", "x")), encoding="utf-8")
    (against,) = evaluate(
        capsys, str(bundle.path), *files[:2], "--reference", str(tmp_path / "half"), "--precision", "float32"
    )
    assert against["equal"] == 60.0


def test_running_server_scores_as_its_bundle_does(
    bundle: Bundle, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = [tmp_path / name for name in ("bundle", "server")]
    (offline,) = evaluate(capsys, str(bundle.path), *files, "--output", str(outputs[0]))
    with ServerProcess(bundle.path) as server:
        (served,) = evaluate(capsys, "--target", server.target, *files, "--output", str(outputs[1]))
        assert main(["evaluate", "model", "--target", server.target, *files]) == 2
        assert "leave out MODEL" in capsys.readouterr().err
    assert outputs[0].read_text() == outputs[1].read_text()
    for name in ("bleu", "chrf", "equal", "candidates", "sentences", "too_long"):
        assert served[name] == offline[name]
    assert main(["evaluate", "--target", "127.0.0.1:1", *files]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_bundle_is_scored_with_the_defaults_of_its_model(
    bundle: Bundle, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, outputs = copy_of(bundle, tmp_path / "copy"), [tmp_path / name for name in ("plain", "bundle", "server")]
    evaluate(capsys, str(copy), *files, "--output", str(outputs[0]))
    manifest = load_bundle(copy).manifest
    defaults = manifest.generation.model_copy(update={"max_new_tokens": 3})
    write_manifest(copy, manifest.model_copy(update={"generation": defaults}))
    evaluate(capsys, str(copy), *files, "--output", str(outputs[1]))
    with ServerProcess(copy) as server:
        evaluate(capsys, "--target", server.target, *files, "--output", str(outputs[2]))
    plain, offline, served = (path.read_text(encoding="utf-8") for path in outputs)
    assert offline == served != plain


@pytest.mark.combinations
def test_shortlist_gives_the_translations_of_a_client_that_asks_for_it(
    bundle: Bundle, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, output = copy_of(bundle, tmp_path / "copy"), tmp_path / "output"
    pairs = (tmp_path / "pairs.source", tmp_path / "pairs.reference")
    for path, lines in zip(pairs, (SOURCES, REFERENCES), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines * 4), encoding="utf-8")
    learned = ("--source", str(pairs[0]), "--reference", str(pairs[1]), "--best", "3", "--frequent", "3")
    assert main(["shortlist", str(copy), *learned]) == 0
    capsys.readouterr()
    with ServerProcess(copy) as server:
        (score,) = evaluate(capsys, "--target", server.target, *files, "--use-shortlist", "--output", str(output))
        with Client(server.target) as client:
            answers = list(client.generate_many(SOURCES, Options(beam_width=1, use_shortlist=True)))
    generations = [answer for answer in answers if isinstance(answer, Generation)]
    assert output.read_text(encoding="utf-8") == "".join(f"{answer.text}\n" for answer in generations)
    assert score["candidates"] == pytest.approx(
        sum(answer.usage.candidate_tokens for answer in generations) / len(SOURCES), abs=0.05
    )
    assert main(["evaluate", str(copy), *files, "--use-shortlist"]) == 2
    assert "--use-shortlist needs --target" in capsys.readouterr().err


def test_beam_search_gives_the_translations_of_a_client_with_that_width(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "source").write_text("".join(f"{line}\n" for line in ENGLISH), encoding="utf-8")
    outputs = {name: tmp_path / name for name in ("greedy", "bundle", "server")}
    evaluate(capsys, str(SHIPPED_BUNDLE), *files, "--output", str(outputs["greedy"]))
    evaluate(capsys, str(SHIPPED_BUNDLE), *files, "--beam-width", "3", "--output", str(outputs["bundle"]))
    with ServerProcess(SHIPPED_BUNDLE) as server:
        target = ("--target", server.target, *files, "--beam-width", "3")
        evaluate(capsys, *target, "--output", str(outputs["server"]))
        with Client(server.target) as client:
            expected = [
                answer.text
                for answer in client.generate_many(ENGLISH, Options(beam_width=3))
                if not isinstance(answer, ServerError)
            ]
    found = {name: path.read_text(encoding="utf-8").split("\n")[:-1] for name, path in outputs.items()}
    assert found["bundle"] == found["server"] == expected
    assert found["bundle"] != found["greedy"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--beam-width", "99"], "--beam-width is 99; it must be between 1 and 16"),
        (["--beam-width", "5", "--rows", "4"], "--beam-width is 5; it must be at most --rows, 4"),
    ],
)
def test_wrong_beam_width_is_refused(
    bundle: Bundle, files: list[str], capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["evaluate", str(bundle.path), *files, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_beam_search_of_a_checkpoint_is_refused(
    checkpoint: Checkpoint, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(checkpoint.text_folder), *files, "--beam-width", "2"]) == 2
    assert "--beam-width needs a bundle or a server" in capsys.readouterr().err


def copy_of(bundle: Bundle, path: Path) -> Path:
    shutil.copytree(bundle.path, path)
    return path


def test_recorded_quality_equals_the_score_of_each_precision(
    bundle: Bundle, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = copy_of(bundle, tmp_path / "copy")
    before = load_bundle(copy).manifest
    for _ in range(2):  # the second run replaces the output of the first
        recorded = evaluate(capsys, str(copy), *files, "--record")
    after = load_bundle(copy).manifest
    assert after.model_copy(update={"quality": ()}) == before
    alone = {name: evaluate(capsys, str(copy), *files, "--precision", name)[0]["bleu"] for name in ("float32", "int8")}
    assert {score["system"]: score["bleu"] for score in recorded} == {f"antiphon {k}": v for k, v in alone.items()}
    assert {held.precision: held.value for held in after.quality} == alone
    together = hashlib.sha256((tmp_path / "source").read_bytes() + (tmp_path / "reference").read_bytes()).hexdigest()
    for held in after.quality:
        assert (held.measure, held.float32, held.file) == ("bleu", alone["float32"], "source and reference")
        assert held.sha256 == together


@pytest.mark.combinations
def test_quality_is_recorded_for_a_bundle_without_float32_graphs_with_its_checkpoint(
    bundle: Bundle, checkpoint: Checkpoint, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = copy_of(bundle, tmp_path / "copy")
    manifest = load_bundle(copy).manifest
    kept = tuple(graphs for graphs in manifest.graphs if graphs.precision == "int8")
    write_manifest(copy, manifest.model_copy(update={"graphs": kept}))
    assert main(["evaluate", str(copy), *files, "--record"]) == 2
    assert "has no float32 graphs to compare with" in capsys.readouterr().err
    assert not load_bundle(copy).manifest.quality
    scores = evaluate(capsys, str(copy), *files, "--record", "--checkpoint", str(checkpoint.text_folder))
    (held,) = load_bundle(copy).manifest.quality
    assert [score["system"] for score in scores] == ["antiphon int8", "pytorch float32"]
    assert (held.precision, held.value, held.float32) == ("int8", scores[0]["bleu"], scores[1]["bleu"])


@pytest.mark.combinations
def test_graphs_for_a_gpu_are_not_recorded_by_a_processor(
    checkpoint: Checkpoint, files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "bundle"
    export_bundle(checkpoint, target, precisions=("float32", "bfloat16"), lowerings=("native", "cuda"), explain=False)
    scores = evaluate(capsys, str(target), *files, "--record")
    assert [score["system"] for score in scores] == ["antiphon float32"]


def test_source_beyond_the_limit_counts_as_untranslated(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "source").write_text("short\n" + "long " * 2000 + "\n")
    (tmp_path / "reference").write_text("kurz\nlang\n")
    files = ["--source", str(tmp_path / "source"), "--reference", str(tmp_path / "reference")]
    (score,) = evaluate(capsys, str(bundle.path), *files, "--output", str(tmp_path / "out"))
    assert (score["sentences"], score["too_long"]) == (2, 1)
    assert (tmp_path / "out").read_text(encoding="utf-8").split("\n")[1] == ""


@pytest.mark.combinations
def test_named_collections_of_a_recipe_are_scored_without_the_others(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = {"one": pairs_of("first", 3000), "two": pairs_of("second", 2000), "three": pairs_of("third", 2500)}
    data = collections(tmp_path, pairs)
    described: dict[str, object] = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 4, "d_ff": 64}
    recipe = Recipe(name="two", data=data, vocab_size=300, model=described, train=TrainConfig())
    arguments = (str(bundle.path), "--recipe", write_recipe(recipe, tmp_path / "two.toml"), "--data", str(tmp_path))
    counts = {name: len(corpus.test) for name, corpus in load_collections(data, tmp_path).items()}
    for name, count in counts.items():
        (score,) = evaluate(capsys, *arguments, "--collection", name)
        assert score["sentences"] == count > 0
    (score,) = evaluate(capsys, *arguments)
    assert score["sentences"] == sum(counts.values())
    (tmp_path / data.collections[0].path).unlink()
    (score,) = evaluate(capsys, *arguments, "--collection", "three", "two")
    assert score["sentences"] == counts["two"] + counts["three"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --recipe with --data, or --source with --reference"),
        (["--source", "/nowhere/a", "--reference", "/nowhere/b"], "/nowhere/a cannot be read"),
        (["--rows", "0"], "--rows is 0; it must be at least 1"),
        (["--recipe", "no-such", "--data", "."], "recipe 'no-such' not found"),
        (["--source", __file__, "--reference", __file__, "--ctranslate2"], "give the checkpoint, not a bundle"),
        (["--source", __file__, "--reference", __file__, "--output", "/nowhere/out"], "no directory /nowhere"),
        (
            ["--source", __file__, "--reference", __file__, "--target-language", "de"],
            "--target-language is 'de'; it must be empty: this model takes none",
        ),
        (["--record", "--precision", "int8", "--source", __file__, "--reference", __file__], "leave out the rest"),
        (["--text", __file__], "--text measures decoder-only and encoder-only models; "),
        (
            ["--recipe", "tatoeba-en-de", "--data", ".", "--collection", "news"],
            "collection 'news' is not one of the recipe's collections: none",
        ),
        (["--recipe", "tatoeba-en-de", "--data", "/nowhere"], "/nowhere/tatoeba-en-de/pairs.en-de.tsv.gz is missing"),
    ],
)
def test_wrong_argument_is_named(
    bundle: Bundle, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(bundle.path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_unequal_files_are_refused(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_text("one\ntwo\n")
    (tmp_path / "b").write_text("one\n")
    files = ["--source", str(tmp_path / "a"), "--reference", str(tmp_path / "b")]
    assert main(["evaluate", str(bundle.path), *files]) == 2
    assert "has 2 lines" in capsys.readouterr().err


def test_evaluating_a_bundle_needs_no_torch() -> None:
    code = "import sys, antiphon.tools.evaluation.evaluate; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
