"""From recipe to answer: a language model is trained, exported and served by one process, and compared with PyTorch."""

import json
import shlex
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from antiphon.bundle.manifest import load_bundle
from antiphon.checkpoints.checkpoint import Checkpoint, load_checkpoint
from antiphon.cli.main import main
from antiphon.client import Client, Options
from antiphon.export.export import export_bundle
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.integration.process import ServerProcess, antiphon
from tests.language_recipes import language_recipe, trained_language_model
from tests.recipe_files import write_recipe

pytestmark = pytest.mark.training

torch.set_num_threads(1)  # arrays this small lose time to threads

SCORE_TOLERANCE = 1e-5  # float32 graphs beside float32 PyTorch: sums in another order
PROMPTS = ["ANNA:\n", "ZOË", "\n", "", "  the sea", "— and no.\n\nBERT:\nwhat"]


@dataclass(frozen=True)
class Trained:
    """Checkpoint of a language model, the folder of data and bundle, the recipe's file, and a client of the server."""

    folder: Path
    checkpoint: Checkpoint
    recipe: str
    ready_line: str
    client: Client


@pytest.fixture(scope="module", params=[257, 290], ids=["bytes", "merges"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("trained")
    averaged = trained_language_model(folder, "run", vocab_size=request.param, max_steps=60, checkpoint_every_steps=60)
    checkpoint = load_checkpoint(averaged)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        export_bundle(checkpoint, folder / "bundle", explain=False)
    recipe = write_recipe(language_recipe(folder, vocab_size=request.param), folder / "recipe.toml")
    with ServerProcess(folder / "bundle", ["--precision", "float32"]) as server, Client(server.target) as client:
        yield Trained(folder, checkpoint, recipe, server.ready_line, client)


def prompt_ids(checkpoint: Checkpoint, prompt: str) -> list[int]:
    """Return the tokens of a prompt; an empty one is a line break."""
    return checkpoint.tokenizer.encode(prompt) or checkpoint.tokenizer.encode("\n")


@torch.no_grad()
def log_probabilities(checkpoint: Checkpoint, ids: Sequence[int]) -> torch.Tensor:
    """Return the log-probabilities of the next token after each token, [T, V]."""
    model = checkpoint.model
    return model.logits(model.decode(torch.tensor([ids]), None))[0].log_softmax(dim=-1)


def greedy(checkpoint: Checkpoint, ids: Sequence[int], count: int) -> list[int]:
    """Return the likeliest tokens after ids; every token is computed from the whole text before it."""
    text = list(ids)
    for _ in range(count):
        text.append(int(log_probabilities(checkpoint, text)[-1].argmax()))
    return text[len(ids) :]


def test_greedy_stream_gives_the_tokens_and_scores_of_pytorch(trained: Trained) -> None:
    checkpoint = trained.checkpoint
    for prompt in PROMPTS:
        ids = prompt_ids(checkpoint, prompt)
        expected = greedy(checkpoint, ids, 10)
        deltas = list(trained.client.generate(prompt, Options(max_new_tokens=10, temperature=0.0, num_logprobs=0)))
        assert [token for delta in deltas for token in delta.token_ids] == expected
        assert "".join(delta.text for delta in deltas) == checkpoint.tokenizer.decode(expected)
        shown = [one.logprob for delta in deltas for one in delta.logprobs]
        reference = log_probabilities(checkpoint, [*ids, *expected])[len(ids) - 1 : -1]
        assert shown == pytest.approx(reference.max(dim=-1).values.tolist(), abs=SCORE_TOLERANCE)


def test_sampled_stream_repeats_with_its_seed_and_is_scored_as_by_pytorch(trained: Trained) -> None:
    checkpoint = trained.checkpoint
    ids = prompt_ids(checkpoint, "BERT:\n")
    texts = set()
    for seed in range(5):
        options = Options(max_new_tokens=12, temperature=1.0, seed=seed, num_logprobs=0)
        deltas = list(trained.client.generate("BERT:\n", options))
        again = list(trained.client.generate("BERT:\n", options))
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokens == [token for delta in again for token in delta.token_ids]
        assert "".join(delta.text for delta in deltas) == checkpoint.tokenizer.decode(tokens)
        reference = log_probabilities(checkpoint, [*ids, *tokens])[len(ids) - 1 : -1]
        found = [one.logprob for delta in deltas for one in delta.logprobs]
        assert found == pytest.approx(reference[range(len(tokens)), tokens].tolist(), abs=SCORE_TOLERANCE)
        texts.add(tuple(tokens))
    assert len(texts) > 1


def test_score_gives_the_log_probabilities_of_pytorch(trained: Trained) -> None:
    checkpoint = trained.checkpoint
    target = checkpoint.tokenizer.encode("good  morrow")
    ids = prompt_ids(checkpoint, "ANNA:\n")
    judged = trained.client.score("ANNA:\n", target)
    reference = log_probabilities(checkpoint, [*ids, *target])[len(ids) - 1 : -1]
    found = [one.logprob for one in judged.logprobs[: len(target)]]
    assert found == pytest.approx(reference[range(len(target)), target].tolist(), abs=SCORE_TOLERANCE)


def test_command_of_the_ready_line_runs(trained: Trained) -> None:
    suggested = shlex.split(trained.ready_line.partition("; next: antiphon ")[2])
    ended = antiphon(*suggested)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout


def evaluated(
    capsys: pytest.CaptureFixture[str], trained: Trained, model: str, *arguments: str
) -> list[dict[str, Any]]:
    asked = ["--recipe", trained.recipe, "--data", str(trained.folder), "--threads", "1", "--json"]
    assert main(["evaluate", str(trained.folder / model), *asked, *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_evaluate_gives_the_scores_of_training(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    expected = json.loads((trained.folder / "run/averaged/scores.json").read_text())
    for model, arguments in (("run/averaged", ()), ("bundle", ("--precision", "float32"))):
        (score,) = evaluated(capsys, trained, model, *arguments)
        for name in ("nats_per_character", "bits_per_byte"):
            assert score[name] == pytest.approx(expected[name], rel=1e-5)
    (valid,) = evaluated(capsys, trained, "bundle", "--precision", "float32", "--part", "valid")
    metrics = json.loads((trained.folder / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert valid["nats_per_character"] == pytest.approx(metrics["nats_per_character"], rel=1e-5)
    assert valid["nats_per_character"] != pytest.approx(expected["nats_per_character"], rel=1e-5)


def test_recorded_perplexity_is_that_of_each_precision(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    alone = {p: evaluated(capsys, trained, "bundle", "--precision", p)[0]["perplexity"] for p in ("float32", "int8")}
    evaluated(capsys, trained, "bundle", "--record")
    quality = load_bundle(trained.folder / "bundle").manifest.quality
    assert {held.precision: held.value for held in quality} == alone
    assert {(held.measure, held.file) for held in quality} == {("perplexity", "first.txt and second.txt")}


@pytest.mark.parametrize(
    ("model", "split", "flags", "message"),
    [
        ("bundle", None, ["--record", "--part", "valid"], "--record scores the recipe's test part; leave out --part"),
        ("run/averaged", (0.5, 0.49999, 0.00001), [], "antiphon evaluate: data.split, test part: "),
        ("bundle", (0.5, 0.49999, 0.00001), [], "antiphon evaluate: data.split, test part: "),
        (str(SHIPPED_BUNDLE), None, [], "recipe 'speeches' has task 'language-model'; {model} has architecture='encod"),
    ],
)
def test_evaluate_names_what_is_wrong(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    model: str, split: tuple[float, ...] | None, flags: list[str], message: str,
) -> None:  # fmt: skip
    recipe = language_recipe(trained.folder)
    data = recipe.data if split is None else recipe.data.model_copy(update={"split": split})
    path = write_recipe(recipe.model_copy(update={"data": data}), tmp_path / "recipe.toml")
    asked = ["evaluate", str(trained.folder / model), "--recipe", path, "--data", str(trained.folder)]
    assert main([*asked, *flags]) == 2
    assert message.format(model=model) in capsys.readouterr().err
