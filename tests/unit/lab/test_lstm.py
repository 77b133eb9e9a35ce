"""The LSTM against a row-by-row calculation with the formulas of the paper, and against itself."""

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from antiphon.lab.recurrent import RecurrentConfig, RecurrentModel, recurrent_greedy
from tests.unit.lab.recurrent_models import random_ids, small_lstm

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
