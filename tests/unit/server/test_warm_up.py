"""Test run of a model before it serves: valid use of every runner, and detection of outputs that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from antiphon.architecture.heads import HeadConfig
from antiphon.architecture.heads import Task as HeadTask
from antiphon.observability.metrics.metric_families import MetricFamilies
from antiphon.rpc.v1.streaming import Pacing
from antiphon.runtime.warm_up import NotFinite, warm_up
from antiphon.server.models.loading import Shared, StartupError, load
from antiphon.server.models.memory import MemoryBudget
from antiphon.server.settings import ServerConfig
from tests.fakes import EOS_ID, FakeRunner
from tests.waits import client_waits

HEADS: dict[HeadTask, HeadConfig] = {"classify": HeadConfig(task="classify", labels=("a", "b"))}


@pytest.mark.parametrize(
    ("runner", "num_rows"),
    [
        (FakeRunner(), 8),
        (FakeRunner(max_rows=1), 1),
        (FakeRunner(max_source_len=4, max_target_len=4, block_size=4), 8),
        (FakeRunner(max_rows=8, num_blocks=7, block_size=16), 3),
        (FakeRunner(has_encoder=False), 8),
        (FakeRunner(has_encoder=False, num_blocks=3), 3),
    ],
)
def test_warm_up_runs_every_row_that_fits(runner: FakeRunner, num_rows: int) -> None:
    """The fake model raises if its contract is broken."""
    warm_up(runner)
    assert runner.decoded_rows == [num_rows]
    assert [len(sources) for sources in runner.encoded] == ([1, num_rows] if runner.facts.has_encoder else [])


def test_warm_up_runs_every_head_of_an_encoder_only_model() -> None:
    runner, asked = FakeRunner(has_decoder=False, heads=HEADS), []
    run_head = runner.run_head

    def noted(task: HeadTask, states: NDArray[np.float32]) -> NDArray[np.float32]:
        asked.append(task)
        return run_head(task, states)

    runner.run_head = noted  # type: ignore[method-assign]
    warm_up(runner)
    assert asked == ["classify"]


def test_warm_up_names_the_graph_whose_outputs_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = FakeRunner()
    decoder.overrides[(EOS_ID,)] = np.full(decoder.facts.vocab_size, np.nan, np.float32)
    encoder, head = FakeRunner(), FakeRunner(has_decoder=False, heads=HEADS)
    monkeypatch.setattr(encoder, "memory", lambda source: np.full((len(source), 4), np.inf, np.float32))
    monkeypatch.setattr(head, "head_outputs", lambda task, states: np.full((len(states), 2), np.nan, np.float32))
    for runner, part in ((decoder, "decoder"), (encoder, "encoder"), (head, "classify")):
        with pytest.raises(NotFinite) as caught:
            warm_up(runner)
        assert caught.value.part == part


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_load_names_the_file_of_a_graph_whose_outputs_are_not_finite(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fail(runner: object) -> None:
        raise NotFinite(part)

    monkeypatch.setattr("antiphon.server.models.loading.warm_up", fail)
    budget = MemoryBudget(None)
    shared = Shared(families=MetricFamilies(CollectorRegistry()), pacing=Pacing(1.0, client_waits()), budget=budget)
    with pytest.raises(StartupError, match=rf"{part}[a-z0-9.]*\.onnx: the outputs of the {part} graph are not finite"):
        load(ServerConfig(threads=1, max_num_seqs=1).plans[0], shared)
    assert not budget.held
