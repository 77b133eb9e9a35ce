"""The server that experiments start: its translations, its errors, and the costs of exported classifiers."""

import random
from pathlib import Path

import pytest
import torch

from antiphon.bundle.manifest import load_bundle
from antiphon.checkpoints.checkpoint import load_checkpoint
from antiphon.client import Options, ServerError
from antiphon.lab.accuracy import fine_tune
from antiphon.lab.served import (
    GRAPH,
    PRECISION,
    SERVED,
    PlainClassifier,
    ServeError,
    classifier_costs,
    classify_all,
    served_translations,
    serving,
)
from tests.encoder_recipes import VERBS, command, fine_tune_recipe, pretrained

pytestmark = pytest.mark.training

BUNDLE = Path(__file__).parents[3] / "model/antiphon/bundles/en-de"


def test_served_translations_are_those_of_single_calls_and_a_refused_source_is_an_error() -> None:
    """Regression: a refused source counted as an empty translation."""
    sources, options = ["How are you?", "I am tired.", "It is cold."], Options(temperature=0)
    with serving(BUNDLE, "int8") as server:
        assert served_translations(server.client, sources, options) == [
            server.client.generate_text(one, options).text for one in sources
        ]
        with pytest.raises(ServerError, match="must be 1 to 256 tokens"):
            served_translations(server.client, [sources[0], "word " * 2000], options)


def test_server_that_does_not_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=f"antiphon serve {tmp_path} ended with exit code 2"), serving(tmp_path):
        pass


def test_graphs_alone_give_the_served_labels_and_every_cost_is_measured(tmp_path: Path) -> None:
    recipe = fine_tune_recipe(tmp_path, "classify", max_steps=60, checkpoint_every_steps=60)
    averaged = fine_tune(recipe, tmp_path, pretrained(tmp_path, max_steps=10))
    chance = random.Random(5)
    texts = [command(chance)[0] for _ in range(20)]
    costs = classifier_costs({"one": averaged}, texts, num_runs=1)
    bundle = load_bundle(averaged.with_name("bundle"))
    plain = PlainClassifier(bundle)
    with serving(bundle.path, PRECISION) as server:
        served = classify_all(server.client, texts)
        by_label = {one.label: one.score for one in server.client.classify(texts[0]).labels}
    sources = plain.encode(texts)
    assert plain.classify(sources) == served
    expected = torch.from_numpy(plain.logits(sources[0])[0]).softmax(dim=-1).tolist()
    assert [by_label[label] for label in plain.labels] == pytest.approx(expected, abs=1e-6)
    assert set(served) == set(VERBS), "a model that gives one label to all texts would show nothing"
    assert set(costs) == {"one"}
    weights = load_checkpoint(averaged).model
    assert costs["one"]["parameters, million"] == sum(one.numel() for one in weights.parameters()) / 1e6
    assert costs["one"]["bundle, MB"] >= sum(path.stat().st_size for path in bundle.path.rglob("*.onnx")) / 1e6
    assert costs["one"][GRAPH] > 0
    assert costs["one"][SERVED] > 0
