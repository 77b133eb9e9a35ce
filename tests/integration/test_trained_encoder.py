"""From recipe to answer: encoders are trained, exported and served by one process, and compared with PyTorch."""

import hashlib
import json
import random
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import torch

from antiphon.architecture.heads import Task
from antiphon.bundle.manifest import load_bundle
from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint
from antiphon.cli.main import main
from antiphon.export.export import export_bundle
from antiphon.runtime.lanes import open_runner
from antiphon.runtime.native import EncoderRunner
from antiphon.text.format import fill
from antiphon.tools.evaluation.labels import evaluate_labels
from antiphon.training.trainer import Trainer
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.encoder_recipes import GROUP, command, fine_tune_recipe, pretrained
from tests.integration.process import ServerProcess, antiphon
from tests.recipe_files import write_recipe

pytestmark = pytest.mark.training

torch.set_num_threads(1)  # arrays this small lose time to threads

SCORE_TOLERANCE = 1e-5  # float32 graphs beside float32 PyTorch: sums in another order


@dataclass(frozen=True)
class Trained:
    """Checkpoints by their served names, the folder of checkpoints and bundles, and the server."""

    folder: Path
    checkpoints: dict[str, Checkpoint]
    ready_line: str
    stub: InferenceServiceStub


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("trained")
    paths = {
        "masks": pretrained(folder, max_steps=60, checkpoint_every_steps=60),
        "word-piece-masks": pretrained(folder / "word-piece", "word_piece", max_steps=60, checkpoint_every_steps=60),
    }
    for name, task, init in (
        ("intents", "classify", "masks"),
        ("entities", "tag", "masks"),
        ("word-piece-intents", "classify", "word-piece-masks"),
    ):
        recipe = fine_tune_recipe(folder, task, checkpoint_every_steps=30)
        averaged = Trainer(recipe, folder, folder / name, GROUP, init=load_checkpoint(paths[init])).run()
        assert averaged is not None
        paths[name] = averaged
    checkpoints = {name: load_checkpoint(path) for name, path in paths.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        for name, checkpoint in checkpoints.items():
            export_bundle(checkpoint, folder / "bundles" / name, precisions=("float32",), explain=False)
    models = [part for name in paths for part in ("--model", f"{name}={folder / 'bundles' / name}")]
    with ServerProcess(None, models) as server, grpc.insecure_channel(server.target) as channel:
        yield Trained(folder, checkpoints, server.ready_line, InferenceServiceStub(channel))


def texts(count: int) -> list[str]:
    chance = random.Random(11)
    return [command(chance)[0] for _ in range(count)]


@torch.no_grad()
def scores(checkpoint: Checkpoint, task: Task, ids: tuple[int, ...], types: tuple[int, ...]) -> torch.Tensor:
    """Return the softmax of a head's outputs for every token, [S, O]."""
    states = checkpoint.model.encode(torch.tensor([ids]), None, torch.tensor([types]))[0]
    return checkpoint.model.read_out(task, states).softmax(dim=-1)


def labels_of(checkpoint: Checkpoint, task: Task) -> tuple[str, ...]:
    return next(head.labels for head in checkpoint.config.heads if head.task == task)


def test_command_of_the_ready_line_runs(trained: Trained) -> None:
    """Ask the default model, which fills masks."""
    suggested = shlex.split(trained.ready_line.partition("; next: antiphon ")[2])
    assert suggested[0] == "fill-mask"
    ended = antiphon(*suggested)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("name", ["intents", "word-piece-intents"])
def test_classify_answers_as_pytorch(trained: Trained, name: str) -> None:
    checkpoint = trained.checkpoints[name]
    labels = labels_of(checkpoint, "classify")
    for text in texts(10):
        found = trained.stub.Classify(pb.ClassifyRequest(model=name, text=text)).labels
        expected = scores(checkpoint, "classify", *fill(checkpoint.text, checkpoint.tokenizer.encode(text)))[0]
        assert found[0].label == labels[int(expected.argmax())]
        by_label = {score.label: score.score for score in found}
        assert [by_label[label] for label in labels] == pytest.approx(expected.tolist(), abs=SCORE_TOLERANCE)


def test_next_sentence_reads_both_texts(trained: Trained) -> None:
    checkpoint = trained.checkpoints["masks"]
    first, second = texts(2)
    request = pb.ClassifyRequest(model="masks", text=first, text_pair=second, task=pb.TASK_NEXT_SENTENCE)
    by_label = {score.label: score.score for score in trained.stub.Classify(request).labels}
    first_ids, second_ids = (checkpoint.tokenizer.encode(text) for text in (first, second))
    expected = scores(checkpoint, "next_sentence", *fill(checkpoint.text, first_ids, second_ids))[0]
    found = [by_label[label] for label in labels_of(checkpoint, "next_sentence")]
    assert found == pytest.approx(expected.tolist(), abs=SCORE_TOLERANCE)


def test_tag_answers_as_pytorch(trained: Trained) -> None:
    checkpoint = trained.checkpoints["entities"]
    labels = labels_of(checkpoint, "tag")
    for text in texts(10):
        found = trained.stub.Tag(pb.TagRequest(model="entities", text=text))
        ids, types = fill(checkpoint.text, checkpoint.tokenizer.encode(text))
        expected = scores(checkpoint, "tag", ids, types)[1:-1]
        assert tuple(token.token_id for token in found.tokens) == ids[1:-1]
        assert [token.label for token in found.tokens] == [labels[best] for best in expected.argmax(dim=-1).tolist()]
        for span in found.spans:
            assert span.label in ("place", "person")
            assert text[span.start : span.end].strip() == text[span.start : span.end]


@pytest.mark.parametrize(("name", "mask"), [("masks", "<mask>"), ("word-piece-masks", "[MASK]")])
def test_fill_mask_answers_as_pytorch(trained: Trained, name: str, mask: str) -> None:
    """The text contains the mask token in a context as in training."""
    checkpoint = trained.checkpoints[name]
    tokenizer, mask_id = checkpoint.tokenizer, checkpoint.text.mask_id
    assert mask_id is not None
    for text in texts(5):
        head, _, tail = text.rpartition(" ")
        response = trained.stub.FillMask(pb.FillMaskRequest(model=name, text=f"{head} {mask}", top_k=3))
        ids, types = fill(checkpoint.text, [*tokenizer.encode(head), mask_id])
        expected = scores(checkpoint, "fill_mask", ids, types)[len(ids) - 2].topk(3)
        (place,) = response.places
        assert place.position == len(ids) - 2, tail
        assert [filling.token_id for filling in place.fillings] == expected.indices.tolist()
        assert [f.score for f in place.fillings] == pytest.approx(expected.values.tolist(), abs=SCORE_TOLERANCE)


@pytest.mark.parametrize(("name", "task", "measure"), [("intents", "classify", "accuracy"), ("entities", "tag", "f1")])
def test_evaluate_gives_the_scores_of_training(trained: Trained, name: str, task: str, measure: str) -> None:
    bundle = load_bundle(trained.folder / "bundles" / name)
    runner = open_runner(bundle, max_rows=8, threads=1)
    assert isinstance(runner, EncoderRunner)
    recipe = fine_tune_recipe(trained.folder, task)
    score = evaluate_labels(bundle, runner, recipe, trained.folder, "test")
    expected = json.loads((trained.folder / name / "averaged/scores.json").read_text())
    assert score.value == pytest.approx(expected[measure])
    assert score.value > 0
    assert (score.precision, score.recall) == tuple(
        pytest.approx(expected[part]) if part in expected else None for part in ("precision", "recall")
    )


@pytest.mark.parametrize(("name", "task", "measure"), [("intents", "classify", "accuracy"), ("entities", "tag", "f1")])
def test_recorded_quality_equals_the_score_of_each_precision(
    trained: Trained, tmp_path: Path, name: str, task: str, measure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        bundle = export_bundle(trained.checkpoints[name], tmp_path / "bundle", explain=False)
    recipe = write_recipe(fine_tune_recipe(trained.folder, task), tmp_path / "recipe.toml")
    asked = ["evaluate", str(bundle.path), "--recipe", recipe, "--data", str(trained.folder), "--json"]
    alone = {}
    for precision in ("float32", "int8"):
        assert main([*asked, "--precision", precision]) == 0
        alone[precision] = json.loads(capsys.readouterr().out)["value"]
    assert main([*asked, "--record"]) == 0
    quality = load_bundle(bundle.path).manifest.quality
    assert {held.precision: held.value for held in quality} == alone
    expected = json.loads((trained.folder / name / "averaged/scores.json").read_text())[measure]
    file = trained.folder / f"{task}.test"
    for held in quality:
        assert (held.measure, held.file) == (measure, file.name)
        assert held.float32 == pytest.approx(expected)
        assert held.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert main([*asked, "--record", "--part", "valid"]) == 2
    assert "leave out --part valid" in capsys.readouterr().err


def test_evaluate_names_the_missing_head(trained: Trained) -> None:
    bundle = str(trained.folder / "bundles" / "masks")
    ended = antiphon("evaluate", bundle, "--recipe", "snips", "--data", str(trained.folder))
    assert ended.returncode == 2
    assert b"recipe 'snips' has task 'classify'" in ended.stderr
    assert b"no head for it" in ended.stderr
