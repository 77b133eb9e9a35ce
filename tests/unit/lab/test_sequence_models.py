"""Transformer and LSTM behind one interface: weights, batches, counted tokens, gradients, and costs by length."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from antiphon.lab import costs, sequence_models
from antiphon.lab.costs import longest_chain, shortest_path
from antiphon.lab.experiments.sequences import trials_on
from antiphon.lab.recurrent import RecurrentModel, RecurrentTask
from antiphon.lab.sequence_models import (
    DECODING,
    LSTM,
    OPEN_TASKS,
    PEAK_LR,
    TRAINING,
    SequenceModel,
    gradient_by_distance,
    load_sequence_model,
    produced_tokens,
    sequence_recipe,
    speeds,
)
from antiphon.lab.trial import Trial, train
from antiphon.training.task import RunFolders
from antiphon.training.trainer import Trainer
from antiphon.training.translation import Batch, Example, TranslationTask, collate
from antiphon.transformer.transformer import Transformer
from tests.unit.lab.recurrent_models import ALONE, SHAPE, SIZES, made_dataset, small_recipe, toy_setting

torch.set_num_threads(1)
PAIRS = [("a b c", "a b c"), ("d e", "d e"), ("f", "f")]
Trained = tuple[Trial, SequenceModel]


@pytest.fixture(scope="module", params=list(OPEN_TASKS))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
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


@pytest.mark.parametrize("kind", ["transformer", "lstm"])
def test_both_models_have_a_similar_size(kind: str, tmp_path: Path) -> None:
    lens = (SIZES.longest_tokens, SIZES.longest_tokens)
    recipe = sequence_recipe("copy", made_dataset(tmp_path), lens, max_steps=1, peak_lr=PEAK_LR[kind])
    trainer = Trainer(recipe, tmp_path, tmp_path / "run", ALONE, open_task=OPEN_TASKS[kind])
    assert 300_000 < sum(parameter.numel() for parameter in trainer.model.parameters()) < 600_000


torch.set_num_threads(1)  # arrays this small are slower with several threads
Model = Transformer | RecurrentModel
SOURCES = [[20, 21, 22, 23, 24], [30, 31, 32, 33, 34]]


def open_task(kind: str, folder: Path) -> RecurrentTask | TranslationTask:
    folders = RunFolders(data=folder, run=folder / "run", group=ALONE)
    recipe = small_recipe(folder)
    return RecurrentTask(recipe, folders, SHAPE) if kind == "lstm" else TranslationTask(recipe, folders)


@pytest.mark.parametrize("kind", ["transformer", "lstm"])
def test_gradient_equals_finite_differences(kind: str, tmp_path: Path) -> None:
    """The change of the loss along each axis of one embedding, in float64, gives the norm of its gradient."""
    task = open_task(kind, tmp_path)
    torch.manual_seed(1)
    model: Model = task.make_model("eager").double().eval()
    loss: nn.Module = task.make_loss(model)  # type: ignore[arg-type]
    examples = [Example(source=[*ids, task.tokenizer.eos_id], target=ids) for ids in SOURCES]
    found = gradient_by_distance(loss, source_embedding(model), collate(examples, task.tokenizer))
    assert len(found) == 5
    for distance in (0, 4):
        norms = [
            torch.tensor(slopes(model, collate([example], task.tokenizer), 4 - distance)).norm() for example in examples
        ]
        assert found[distance] == pytest.approx(float(sum(norms)) / 2, rel=1e-5)  # the loss's gradient is float64


def source_embedding(model: Model) -> nn.Embedding:
    assert model.encoder is not None
    return model.encoder.embedding


def slopes(model: Model, batch: Batch, position: int) -> list[float]:
    """Return the change of the last word's loss for each axis of the embedding of one source position."""
    step = 1e-4
    return [
        (shifted_loss(model, batch, position, axis, step) - shifted_loss(model, batch, position, axis, -step))
        / (2 * step)
        for axis in range(source_embedding(model).embedding_dim)
    ]


@torch.no_grad()
def shifted_loss(model: Model, batch: Batch, position: int, axis: int, by: float) -> float:
    """Return the loss of the fifth target token if the source's embedding, the first in the pass, is changed."""
    shifts = [by]

    def add(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        output = output.clone()
        output[0, position, axis] += shifts.pop() if shifts else 0.0
        return output

    hook = source_embedding(model).register_forward_hook(add)
    if isinstance(model, Transformer):
        logits = model(batch.source, batch.inputs, batch.source_lens)
    else:
        logits = model.logits(model.decode(batch.inputs, model.encode(batch.source, batch.source_lens)))
    hook.remove()
    return -float(logits[0, 4].log_softmax(0)[batch.labels[0, 4]])


def test_sources_of_different_lengths_are_refused(tmp_path: Path) -> None:
    task = open_task("lstm", tmp_path)
    examples = [Example(source=[20, 2], target=[20]), Example(source=[20, 21, 2], target=[20])]
    with pytest.raises(ValueError, match=r"source_lens has the values \[2, 3\]"):
        gradient_by_distance(nn.Identity(), nn.Embedding(4, 8), collate(examples, task.tokenizer))


def test_target_without_a_word_is_refused(tmp_path: Path) -> None:
    task = open_task("lstm", tmp_path)
    batch = collate([Example(source=[20, 2], target=[])], task.tokenizer)
    with pytest.raises(ValueError, match="a target has no token before its end token"):
        gradient_by_distance(nn.Identity(), nn.Embedding(4, 8), batch)


torch.set_num_threads(1)


def test_chain_and_path_of_a_known_graph() -> None:
    first, second = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    output = first
    for _ in range(5):
        output = output.exp()
    output = (output * second).sum()
    # AccumulateGrad of `first`, five exponentials, the product, the sum.
    assert longest_chain(output) == 8
    assert shortest_path(output, first) == 7
    assert shortest_path(output, second) == 2
    with pytest.raises(ValueError, match="does not depend"):
        shortest_path(output, torch.ones(1, requires_grad=True))


@pytest.mark.parametrize("length", [8, 40])
def test_operations_are_those_of_the_formulas(length: int) -> None:
    width = costs.WIDTH
    projections = 2 * length * width * 4 * width  # queries, keys, values and output
    products = 2 * 2 * length**2 * width  # scores, and their sum of values
    assert costs.num_operations("attention, eager", length) == projections + products
    assert costs.num_operations("attention, sdpa", length) == projections + products
    assert costs.num_operations("LSTM", length) == 2 * length * 2 * width * 4 * width


def test_chain_of_the_lstm_grows_with_each_step_and_that_of_attention_does_not() -> None:
    attention = [costs.operation_paths("attention, eager", length) for length in (8, 16, 32)]
    assert len(set(attention)) == 1
    recurrent = [costs.operation_paths("LSTM", length) for length in (8, 16, 32)]
    for one in (0, 1):
        first, second, third = (paths[one] for paths in recurrent)
        assert third - second == 2 * (second - first) > 0


def test_costs_have_every_figure_of_every_layer() -> None:
    found = costs.layer_costs(8, num_runs=1)
    assert found.keys() == {f"{name}, {unit}" for name in costs.LAYERS for unit in ("Mflop", "MB", "ms")}
    assert all(value > 0 for value in found.values())


def test_memory_of_eager_attention_has_the_score_matrices_and_that_of_the_lstm_grows_with_tokens() -> None:
    shorter, longer, heads = 256, 512, 4
    more = 4 * heads * (longer**2 - shorter**2)
    eager, sdpa, recurrent = (
        [costs.allocated_peak(costs.step_of(make(), length)) for length in (shorter, longer, 2 * longer)]
        for make in costs.LAYERS.values()
    )
    assert eager[1] - eager[0] > 2 * more
    assert sdpa[1] - sdpa[0] < more
    assert recurrent[2] - recurrent[1] == pytest.approx(2 * (recurrent[1] - recurrent[0]), rel=0.05)
