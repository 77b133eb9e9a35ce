"""The LSTM against the paper's formulas and against itself, its scan, and its training by Trainer."""

import json
import os
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from antiphon.checkpoints.checkpoint import load_weights, read_tensors
from antiphon.errors import CheckpointError, RecipeError
from antiphon.lab.recurrent import (
    OpenRecurrent,
    RecurrentConfig,
    RecurrentModel,
    RecurrentTask,
    load_recurrent,
    recurrent_greedy,
)
from antiphon.lab.scan import SPLITS, Split, scan_dataset
from antiphon.text.tokenizer import Tokenizer
from antiphon.training.corpus import load_corpus
from antiphon.training.task import RunFolders
from antiphon.training.trainer import Trainer
from antiphon.training.translation import TranslationTask
from tests.unit.lab.recurrent_models import ALONE, SHAPE, random_ids, small_lstm, small_recipe

torch.set_num_threads(1)  # arrays this small are slower with several threads
LAYERS = [(1, 1), (2, 2)]
LENS = [7, 3, 5]


def padded_sources() -> tuple[Tensor, Tensor]:
    """Return source ids [3, 7], with ids that are not the padding id after the end of a row, and lengths."""
    return torch.tensor(random_ids(3, 7, seed=1)), torch.tensor(LENS, dtype=torch.int32)


def cell(
    weights: dict[str, Tensor], suffix: str, inputs: Tensor, state: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the new states [M] of an LSTM cell (Hochreiter and Schmidhuber 1997, with forget gate)."""
    gates = weights[f"weight_ih{suffix}"] @ inputs + weights[f"bias_ih{suffix}"]
    gates = gates + weights[f"weight_hh{suffix}"] @ state[0] + weights[f"bias_hh{suffix}"]
    enter, forget, candidate, leave = gates.chunk(4)
    memory = forget.sigmoid() * state[1] + enter.sigmoid() * candidate.tanh()
    return leave.sigmoid() * memory.tanh(), memory


def encoded(model: RecurrentModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states [S, M] of one source [S], and the backward state of its first token."""
    weights = {name: value.detach() for name, value in model.encoder.lstm.named_parameters()}
    states = model.encoder.embedding(ids).detach()
    for layer in range(model.config.encoder_layers):
        sides = []
        for suffix, rows in ((f"_l{layer}", states), (f"_l{layer}_reverse", states.flip(0))):
            state = (torch.zeros(8), torch.zeros(8))
            found = []
            for row in rows:
                state = cell(weights, suffix, row, state)
                found.append(state[0])
            sides.append(torch.stack(found))
        states = torch.cat((sides[0], sides[1].flip(0)), dim=1)
    return states, states[0, 8:]


def reference(model: RecurrentModel, source: Tensor, target: Tensor) -> Tensor:
    """Return logits [T, V] of one pair without padding, by the formulas of Bahdanau et al. 2015, appendix A."""
    memory, backward = encoded(model, source)
    decoder, attention = model.decoder, model.decoder.attention
    starts = torch.tanh(model.start(backward)).chunk(model.config.decoder_layers)
    states = [(start, torch.zeros(16)) for start in starts]
    logits = []
    for token in decoder.embedding(target):
        scores = [
            attention.score.weight[0] @ torch.tanh(attention.query(states[-1][0]) + attention.key.weight @ row)
            for row in memory
        ]
        context = (torch.softmax(torch.stack(scores), 0)[:, None] * memory).sum(0)
        inputs = torch.cat((token, context))
        for index, layer in enumerate(decoder.cells):
            states[index] = cell(dict(layer.named_parameters()), "", inputs, states[index])
            inputs = states[index][0]
        logits.append(model.output(torch.tanh(decoder.mix(torch.cat((inputs, context, token))))))
    return torch.stack(logits)


@pytest.mark.parametrize(("encoder_layers", "decoder_layers"), LAYERS)
@torch.no_grad()
def test_padded_batch_equals_the_formulas_row_by_row(encoder_layers: int, decoder_layers: int) -> None:
    model = small_lstm(encoder_layers=encoder_layers, decoder_layers=decoder_layers)
    sources, lens = padded_sources()
    targets = torch.tensor(random_ids(3, 6, seed=2))
    found = model.logits(model.decode(targets, model.encode(sources, lens)))
    for row, length in enumerate(LENS):
        expected = reference(model, sources[row, :length], targets[row])
        torch.testing.assert_close(found[row], expected, atol=1e-5, rtol=1e-4)  # float32 sums in another order


@pytest.mark.parametrize(("encoder_layers", "decoder_layers"), LAYERS)
@torch.no_grad()
def test_steps_equal_teacher_forcing(encoder_layers: int, decoder_layers: int) -> None:
    model = small_lstm(encoder_layers=encoder_layers, decoder_layers=decoder_layers)
    sources, lens = padded_sources()
    targets = torch.tensor(random_ids(3, 6, seed=2))
    memory = model.encode(sources, lens)
    whole = model.decode(targets, memory)
    state = model.start_state(memory)
    for position in range(6):
        hidden, state = model.step(targets[:, position : position + 1], state, memory)
        torch.testing.assert_close(hidden[:, 0], whole[:, position])


def test_greedy_batch_equals_each_source_alone() -> None:
    model = small_lstm()
    with torch.no_grad():
        model.output.bias.zero_()
        for name, parameter in model.named_parameters():
            parameter.mul_(1 if "embedding" in name else 3)  # with small weights all sources have the same output
    sources = [ids[:length] for ids, length in zip(random_ids(6, 9, seed=5), (9, 2, 5, 1, 7, 9), strict=True)]
    found = recurrent_greedy(model, sources, 12)
    assert found == [recurrent_greedy(model, [source], 12)[0] for source in sources]
    assert len({tuple(ids) for ids in found}) > 1


def test_greedy_ends_at_the_end_token() -> None:
    model = small_lstm()
    with torch.no_grad():
        model.output.bias[model.config.eos_id] = 100.0
    assert recurrent_greedy(model, random_ids(2, 4, seed=1), 12) == [[], []]


def test_dropout_acts_only_in_training_mode() -> None:
    model = small_lstm(dropout=0.5)
    sources, lens = padded_sources()
    first, second = (model.decode(sources, model.encode(sources, lens)) for _ in range(2))
    assert torch.equal(first, second)
    model.train()
    first, second = (model.decode(sources, model.encode(sources, lens)) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("field", "value"), [("d_model", 15), ("dropout", 1.0), ("eos_id", 20), ("num_heads", 2)])
def test_wrong_field_is_named(field: str, value: object) -> None:
    fields = dict(vocab_size=20, d_model=16) | {field: value}
    with pytest.raises(ValidationError, match=field):
        RecurrentConfig.model_validate(fields)


DATA = os.environ.get("ANTIPHON_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="ANTIPHON_DATA does not name a folder with the training data")
# Numbers of examples that Lake and Baroni 2018 and Loula et al. 2018 publish: training, test.
PUBLISHED: dict[Split, tuple[int, int]] = {
    "simple": (16728, 4182),
    "length": (16990, 3920),
    "addprim_jump": (14670, 7706),
    "addprim_turn_left": (21890, 1208),
    "template_around_right": (15225, 4476),
    "template_jump_around_right": (18528, 1173),
    "template_opposite_right": (15225, 4476),
    "template_right": (15225, 4476),
}


@needs_data
@pytest.mark.parametrize("split", SPLITS)
def test_split_has_the_published_sizes_without_leakage(split: Split, tmp_path: Path) -> None:
    corpus = load_corpus(scan_dataset(Path(str(DATA)), split, tmp_path).data, tmp_path)
    assert (len(corpus.train) + len(corpus.valid), len(corpus.test)) == PUBLISHED[split]
    assert 0.01 < len(corpus.valid) / PUBLISHED[split][0] < 0.03
    parts = [{command for command, _ in part} for part in (corpus.train, corpus.valid, corpus.test)]
    assert parts[0].isdisjoint(parts[1] | parts[2])
    assert parts[1].isdisjoint(parts[2])


@needs_data
def test_examples_of_a_template_split_outside_both_parts_have_turn_in_the_place_of_the_verb(tmp_path: Path) -> None:
    everything = load_corpus(scan_dataset(Path(str(DATA)), "simple", tmp_path).data, tmp_path)
    split = load_corpus(scan_dataset(Path(str(DATA)), "template_around_right", tmp_path).data, tmp_path)
    of_parts = {*split.train, *split.valid, *split.test}
    rest = [pair for pair in [*everything.train, *everything.valid, *everything.test] if pair not in of_parts]
    assert len(rest) == 20_910 - 15_225 - 4_476
    assert all("turn around right" in command for command, _ in rest)
    assert not any("around right" in command for command, _ in [*split.train, *split.valid])
    assert all("around right" in command for command, _ in split.test)


@needs_data
@pytest.mark.parametrize("split", ["addprim_jump", "addprim_turn_left"])
def test_the_lone_primitive_is_trained(split: Split, tmp_path: Path) -> None:
    train = load_corpus(scan_dataset(Path(str(DATA)), split, tmp_path).data, tmp_path).train
    primitive = split.removeprefix("addprim_").replace("_", " ")
    assert sum(command == primitive for command, _ in train) > 1000


@needs_data
def test_each_word_is_one_token(tmp_path: Path) -> None:
    dataset = scan_dataset(Path(str(DATA)), "length", tmp_path)
    corpus = load_corpus(dataset.data, tmp_path)
    tokenizer = Tokenizer.train([text for pair in corpus.train for text in pair], dataset.vocab_size)
    for text in (text for pair in [*corpus.train[:500], *corpus.test[:500]] for text in pair):
        assert len(tokenizer.encode(text)) == len(text.split())


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"scan/tasks_train_simple\.txt\.gz is missing"):
        scan_dataset(tmp_path, "simple", tmp_path)


torch.set_num_threads(1)  # arrays this small are slower with several threads


def make_trainer(folder: Path, run: str, **train: object) -> Trainer:
    return Trainer(small_recipe(folder, **train), folder, folder / run, ALONE, open_task=OpenRecurrent(SHAPE))


def test_batches_are_those_of_the_transformer(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path)
    lstm = RecurrentTask(recipe, RunFolders(data=tmp_path, run=tmp_path / "lstm", group=ALONE), SHAPE)
    transformer = TranslationTask(recipe, RunFolders(data=tmp_path, run=tmp_path / "transformer", group=ALONE))
    expected, found = transformer.batches("train", 7), lstm.batches("train", 7)
    assert len(expected) == len(found) > 1
    for index in range(len(expected)):
        for name in ("source", "source_lens", "inputs", "labels"):
            assert torch.equal(getattr(expected[index], name), getattr(found[index], name))


def test_stopped_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = make_trainer(tmp_path, "whole").run()
    stopped = make_trainer(tmp_path, "stopped")
    step = stopped.train_step

    def stopped_at_9(batch: object) -> float:
        if stopped.progress.step == 9:
            raise InterruptedError
        return step(batch)  # type: ignore[arg-type]

    stopped.train_step = stopped_at_9  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        stopped.run()
    again = make_trainer(tmp_path, "stopped").run()
    assert whole is not None
    assert again is not None
    expected, found = (read_tensors(path / "model.safetensors") for path in (whole, again))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_training_lowers_the_loss_and_its_checkpoint_is_read_back(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, "run", max_steps=40, checkpoint_every_steps=40)
    before = trainer.validate()
    averaged = trainer.run()
    assert averaged is not None
    assert trainer.validate() < before - 0.5
    model = load_recurrent(averaged)
    assert model.config == trainer.task.config
    assert not model.training
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_damaged_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    averaged = make_trainer(tmp_path, "run", max_steps=1).run()
    assert averaged is not None
    config = averaged / "config.json"
    described = json.loads(config.read_text())
    config.write_text(json.dumps(described | {"version": 9}))
    with pytest.raises(CheckpointError, match=r"config\.json: version is 9, expected 1"):
        load_recurrent(averaged)
    described["model"]["d_model"] = 15
    config.write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=r"config\.json: d_model"):
        load_recurrent(averaged)
    config.unlink()
    with pytest.raises(CheckpointError, match=r"averaged is not a checkpoint: config\.json is missing"):
        load_recurrent(averaged)


def test_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    averaged = make_trainer(tmp_path, "run", max_steps=1).run()
    assert averaged is not None
    other = Trainer(
        small_recipe(tmp_path), tmp_path, tmp_path / "wide", ALONE, open_task=OpenRecurrent(SHAPE | {"d_model": 48})
    )
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .* has shape"):
        load_weights(other.model, averaged / "model.safetensors")


def test_wrong_field_of_the_shape_is_named(tmp_path: Path) -> None:
    folders = RunFolders(data=tmp_path, run=tmp_path / "run", group=ALONE)
    with pytest.raises(RecipeError, match="LSTM: d_model"):
        RecurrentTask(small_recipe(tmp_path), folders, {"d_model": 15})
