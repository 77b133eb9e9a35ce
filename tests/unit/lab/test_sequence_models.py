"""Transformer and LSTM behind one interface: initial weights, batches, counted tokens; training steps by length."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from antiphon.lab import sequence_models
from antiphon.lab.experiments.sequences import trials_on
from antiphon.lab.sequence_models import (
    DECODING,
    LSTM,
    OPEN_TASKS,
    TRAINING,
    SequenceModel,
    load_sequence_model,
    produced_tokens,
    speeds,
)
from antiphon.lab.trial import Trial, train
from antiphon.training.trainer import Trainer
from tests.unit.lab.recurrent_models import ALONE, SIZES, made_dataset
from tests.unit.lab.settings import toy_setting

torch.set_num_threads(1)

PAIRS = [("a b c", "a b c"), ("d e", "d e"), ("f", "f")]

Trained = tuple[Trial, SequenceModel]


@pytest.fixture(scope="module", params=list(OPEN_TASKS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return a trial of 12 steps and its model."""
    folder = tmp_path_factory.mktemp(request.param)
    lens = (SIZES.longest_tokens, SIZES.longest_tokens)
    trials = trials_on(
        toy_setting(folder, seeds=(5,)), "copy", made_dataset(folder / "data"), lens, dict.fromkeys(OPEN_TASKS, 1)
    )
    trial = next(trial for trial in trials if trial.name.endswith(request.param))
    train(trial, folder / "run")
    return trial, load_sequence_model(folder / "run/averaged", request.param)


def test_untrained_model_has_the_weights_at_the_start_of_the_run(trained: Trained, tmp_path: Path) -> None:
    """Regression: only some modules were reset, by PyTorch's rules, and norms kept their trained weights."""
    trial, model = trained
    expected = Trainer(trial.recipe, trial.data, tmp_path, ALONE, open_task=trial.open_task).model.state_dict()
    before = torch.random.get_rng_state()
    found = model.untrained(trial.seed).model.state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert found.keys() == expected.keys()
    for name, weights in expected.items():
        assert torch.equal(found[name], weights), name
    assert any(not torch.equal(found[name], weights) for name, weights in model.model.state_dict().items())


def test_produced_tokens_count_the_end_token_only_where_there_is_one(trained: Trained) -> None:
    _, model = trained
    untrained = model.untrained(1)
    batch = untrained.batch(PAIRS)
    sources = [row[:length].tolist() for row, length in zip(batch.source, batch.source_lens.tolist(), strict=True)]
    for end, expected in ((float("-inf"), 7), (float("inf"), 1)):  # no row ends; every row ends at once
        hook = untrained.model.output.register_forward_hook(partial(with_end, untrained.tokenizer.eos_id, end))
        assert produced_tokens(untrained, sources, 7) == [expected] * len(PAIRS)
        hook.remove()


def with_end(eos_id: int, end: float, _module: nn.Module, _inputs: object, logits: Tensor) -> Tensor:
    """Return logits with another value for the end token."""
    return logits.index_fill(-1, torch.tensor([eos_id]), end)


def test_batch_has_the_texts_with_end_tokens(trained: Trained) -> None:
    _, model = trained
    tokenizer = model.tokenizer
    batch = model.batch(PAIRS)
    for (source, target), ids, length, labels in zip(
        PAIRS, batch.source, batch.source_lens.tolist(), batch.labels, strict=True
    ):
        assert ids[:length].tolist() == [*tokenizer.encode(source), tokenizer.eos_id]
        expected = [*tokenizer.encode(target), tokenizer.eos_id]
        assert labels[: len(expected)].tolist() == expected


def test_speeds_decode_the_given_weights_before_training_changes_them(trained: Trained) -> None:
    _, model = trained
    copy = model.untrained(1)
    start = {name: weights.clone() for name, weights in copy.model.state_dict().items()}
    seen: list[bool] = []
    copy.model.output.register_forward_hook(  # only decoding calls it: the loss uses its weights
        lambda *_: seen.append(all(torch.equal(start[name], now) for name, now in copy.model.state_dict().items()))
    )
    found = speeds({"copy": copy}, PAIRS, num_runs=1)
    assert found["copy"].keys() == {TRAINING, DECODING}
    assert min(found["copy"].values()) > 0
    assert seen
    assert all(seen)
    assert any(not torch.equal(start[name], now) for name, now in copy.model.state_dict().items())


def test_steps_reduce_the_loss_of_every_model() -> None:
    batch = sequence_models.random_batch(8)
    for make in sequence_models.LOSSES.values():
        torch.manual_seed(1)
        update = sequence_models.WeightUpdate(make(8).train(), batch)
        before = update.loss(batch, 0.0).item()
        for _ in range(5):
            update.run()
        assert update.loss(batch, 0.0).item() < before


def test_memory_of_the_lstm_has_a_vector_for_each_pair_of_tokens() -> None:
    """Additive attention keeps tanh(W s + U h), of the model's width, for each target and source token."""
    width, shorter, longer = int(str(LSTM["d_model"])), 64, 128
    peaks = [
        sequence_models.step_peak_bytes(
            sequence_models.WeightUpdate(sequence_models.recurrent_loss(length), sequence_models.random_batch(length))
        )
        for length in (shorter, longer)
    ]
    assert peaks[1] - peaks[0] > 4 * width * (longer**2 - shorter**2)


def test_costs_have_every_figure_of_every_model() -> None:
    found = sequence_models.step_costs(4, num_runs=1)
    assert found.keys() == {f"{name}, {unit}" for name in sequence_models.LOSSES for unit in ("MB", "ms")}
    assert all(value > 0 for value in found.values())
