"""LSTM encoder-decoder, for comparison with the Transformer: shape, model, greedy decoding, training. It is not served.

Attention is additive (Bahdanau et al. 2015); LSTM cells are in place of gated units.
Axes: B batch, S source, T target, M model width, V vocabulary, L decoder layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from antiphon.bundle.manifest import Provenance
from antiphon.checkpoints.checkpoint import load_weights, read_config
from antiphon.errors import RecipeError
from antiphon.ops.attention import Backend
from antiphon.training.batches import PlannedBatches
from antiphon.training.corpus import Part
from antiphon.training.recipe import Recipe
from antiphon.training.task import RunFolders
from antiphon.training.translation import Batch, TranslationTask, labelled_loss


class RecurrentConfig(BaseModel):
    """Shape of the LSTM encoder-decoder. Raises pydantic.ValidationError naming the wrong field.

    d_model: width of embeddings, of the decoder's state and of the memory; each direction of the encoder has half.
    Lengths are in tokens and include begin and end tokens; they limit only the data, because the model has no
    positions.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    architecture: Literal["lstm"] = "lstm"
    vocab_size: int = Field(ge=4, le=1_000_000)
    d_model: int = Field(ge=8, le=16384, multiple_of=2)
    encoder_layers: int = Field(default=1, ge=1, le=128)
    decoder_layers: int = Field(default=1, ge=1, le=128)
    dropout: float = Field(default=0.1, ge=0, lt=1, description="On embeddings, between layers and before the output.")
    max_source_len: int = Field(default=256, ge=1, le=65536)
    max_target_len: int = Field(default=256, ge=1, le=65536)
    pad_id: int = Field(default=0, ge=0)
    bos_id: int = Field(default=1, ge=0, description="First decoder input.")
    eos_id: int = Field(default=2, ge=0)
    unk_id: int = Field(default=3, ge=0)

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        for name in ("pad_id", "bos_id", "eos_id", "unk_id"):
            if getattr(self, name) >= self.vocab_size:
                raise ValueError(f"{name}={getattr(self, name)} must be below vocab_size={self.vocab_size}")
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Encoded sources.

    states: [B, S, M] of both directions; keys: [B, S, M], U h of the attention's score
    mask: [B, S] float32, 0 for tokens and -inf for padding
    start: [B, L, M] start of the decoder's hidden states
    """

    states: Tensor
    keys: Tensor
    mask: Tensor
    start: Tensor


State = tuple[tuple[Tensor, Tensor], ...]
"""For each decoder layer hidden and cell state, two of [B, M] float32."""


class AdditiveAttention(nn.Module):
    """Score v^T tanh(W s + U h) of state s and memory h (Bahdanau et al. 2015, section A.1.2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, state: Tensor, memory: Memory) -> Tensor:
        """Return the context [B, M] of a decoder state [B, M]: the mean of the memory, weighted by the score."""
        hidden = torch.tanh(self.query(state)[:, None] + memory.keys)
        weights = torch.softmax(self.score(hidden).squeeze(2) + memory.mask, dim=1)  # [B, S]
        return torch.bmm(weights[:, None], memory.states).squeeze(1)


class RecurrentEncoder(nn.Module):
    """Bidirectional LSTM: token ids [B, S] -> states [B, S, M] and the last state of the backward direction."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = nn.LSTM(
            config.d_model,
            config.d_model // 2,
            num_layers=config.encoder_layers,
            dropout=config.dropout if config.encoder_layers > 1 else 0.0,
            batch_first=True,
            bidirectional=True,
        )

    def forward(self, ids: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """Return states [B, S, M] and the backward state of the first token [B, M / 2]; ids [B, S], lens [B]."""
        embedded = self.dropout(self.embedding(ids))
        packed = pack_padded_sequence(embedded, lens.long().cpu(), batch_first=True, enforce_sorted=False)
        output, (last, _) = self.lstm(packed)
        states, _ = pad_packed_sequence(output, batch_first=True, total_length=ids.shape[1])
        return self.dropout(states), last[-1]


class RecurrentDecoder(nn.Module):
    """LSTM whose first layer reads the embedding and the context of the previous state.

    The output is tanh(W [state; context; embedding]), in place of the paper's maxout.
    """

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        width = config.d_model
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.dropout = nn.Dropout(config.dropout)
        self.attention = AdditiveAttention(width)
        inputs = [2 * width, *[width] * (config.decoder_layers - 1)]
        self.cells = nn.ModuleList(nn.LSTMCell(size, width) for size in inputs)
        self.mix = nn.Linear(3 * width, width)

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings [B, T, M] with dropout; ids [B, T] int64."""
        return self.dropout(self.embedding(ids))  # type: ignore[no-any-return]

    def advance(self, embedded: Tensor, state: State, memory: Memory) -> tuple[Tensor, Tensor, State]:
        """Run one token a row [B, M]; return the top layer's state and the context, both [B, M], and the new state."""
        context = self.attention(state[-1][0], memory)
        hidden = torch.cat((embedded, context), dim=1)
        states = []
        for index, (cell, previous) in enumerate(zip(self.cells, state, strict=True)):
            states.append(cell(self.dropout(hidden) if index else hidden, previous))
            hidden = states[-1][0]
        return hidden, context, tuple(states)

    def read(self, top: Tensor, context: Tensor, embedded: Tensor) -> Tensor:
        """Return the input of the output projection, [..., M], of three [..., M]."""
        return self.dropout(torch.tanh(self.mix(torch.cat((top, context, embedded), dim=-1))))  # type: ignore[no-any-return]


class RecurrentModel(nn.Module):
    """Encoder, decoder and output projection. Methods have the names of Transformer's."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = RecurrentEncoder(config)
        self.decoder = RecurrentDecoder(config)
        self.start = nn.Linear(config.d_model // 2, config.decoder_layers * config.d_model)
        self.output = nn.Linear(config.d_model, config.vocab_size)
        self._initialise()

    def _initialise(self) -> None:
        """Set the biases of the forget gates to 1 in sum (Jozefowicz et al. 2015), so that early states last."""
        for name, parameter in self.named_parameters():
            if "bias_ih" in name or "bias_hh" in name:
                width = parameter.shape[0] // 4
                nn.init.zeros_(parameter)
                if "bias_ih" in name:
                    nn.init.ones_(parameter[width : 2 * width])

    @property
    def num_parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    def encode(self, source_ids: Tensor, source_lens: Tensor) -> Memory:
        """Return the encoded sources; source_ids [B, S] int64, source_lens [B] int32, at least 1."""
        states, backward = self.encoder(source_ids, source_lens)
        is_padding = torch.arange(source_ids.shape[1], device=source_ids.device) >= source_lens[:, None]
        return Memory(
            states=states,
            keys=self.decoder.attention.key(states),
            mask=torch.zeros(is_padding.shape, device=states.device).masked_fill(is_padding, float("-inf")),
            start=torch.tanh(self.start(backward)).view(-1, self.config.decoder_layers, self.config.d_model),
        )

    def start_state(self, memory: Memory) -> State:
        """Return the decoder's first state: tanh(W h) of the backward encoder state (section A.2.2), and zero cells."""
        return tuple((hidden, torch.zeros_like(hidden)) for hidden in memory.start.unbind(1))

    def decode(self, target_ids: Tensor, memory: Memory) -> Tensor:
        """Return hidden [B, T, M] of all positions (teacher forcing); target_ids [B, T] int64, begin token first."""
        embedded = self.decoder.embed(target_ids)
        state = self.start_state(memory)
        tops, contexts = [], []
        for token in embedded.unbind(1):
            top, context, state = self.decoder.advance(token, state, memory)
            tops.append(top)
            contexts.append(context)
        return self.decoder.read(torch.stack(tops, dim=1), torch.stack(contexts, dim=1), embedded)

    def step(self, token_ids: Tensor, state: State, memory: Memory) -> tuple[Tensor, State]:
        """Run one new token a row, token_ids [B, 1] int64; return hidden [B, 1, M] and the new state."""
        embedded = self.decoder.embed(token_ids)
        top, context, state = self.decoder.advance(embedded[:, 0], state, memory)
        return self.decoder.read(top[:, None], context[:, None], embedded), state

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of hidden [..., M]."""
        return self.output(hidden)  # type: ignore[no-any-return]


@torch.no_grad()
def recurrent_greedy(model: RecurrentModel, sources: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
    """Decode sources (with end token, any lengths) as one batch, with the most likely token in each step.

    Returns the target ids of each source without begin and end tokens. At most max_new_tokens tokens are generated for
    each source, the end token included. The model must be in evaluation mode.
    """
    lens = torch.tensor([len(source) for source in sources], dtype=torch.int32)
    padded = torch.full((len(sources), int(lens.max())), model.config.pad_id)
    for row, source in enumerate(sources):
        padded[row, : len(source)] = torch.tensor(source)
    eos_id = model.config.eos_id
    return [ids[: ids.index(eos_id)] if eos_id in ids else ids for ids in _produce(model, padded, lens, max_new_tokens)]


def _produce(model: RecurrentModel, sources: Tensor, lens: Tensor, max_new_tokens: int) -> list[list[int]]:
    memory = model.encode(sources, lens)
    state = model.start_state(memory)
    token = torch.full((len(lens), 1), model.config.bos_id)
    ended = torch.zeros(len(lens), dtype=torch.bool)
    produced = []
    for _ in range(max_new_tokens):
        hidden, state = model.step(token, state, memory)
        token = model.logits(hidden).argmax(dim=-1)
        produced.append(token)
        ended |= token[:, 0] == model.config.eos_id
        if ended.all():
            break
    return list(torch.cat(produced, dim=1).tolist())


class RecurrentLoss(nn.Module):
    """Loss of a batch; logits are computed only for labelled positions."""

    def __init__(self, model: RecurrentModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, smoothing: float) -> Tensor:
        """Return the summed label-smoothed cross entropy of the labelled positions, [1], in nats."""
        hidden = self.model.decode(batch.inputs, self.model.encode(batch.source, batch.source_lens))
        return labelled_loss(hidden, batch, self.model.output, smoothing)


class RecurrentTask:
    """TrainingTask of the LSTM. Tokenizer, examples and batches are those that a Transformer of the recipe gets.

    shape: fields of RecurrentConfig without vocabulary, lengths and ids, which the recipe's data and model decide.
    Raises RecipeError for a wrong field, and what TranslationTask raises.
    """

    num_losses = 1

    def __init__(self, recipe: Recipe, folders: RunFolders, shape: Mapping[str, object]) -> None:
        self.pairs = TranslationTask(recipe, folders)
        self.tokenizer = self.pairs.tokenizer
        self.text = self.pairs.text
        common = ("vocab_size", "max_source_len", "max_target_len", "pad_id", "bos_id", "eos_id", "unk_id")
        shared = {name: getattr(self.pairs.config, name) for name in common}
        try:
            self.config = RecurrentConfig.model_validate({**shape, **shared})
        except ValidationError as error:
            first = error.errors()[0]
            raise RecipeError(f"LSTM: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    @property
    def provenance(self) -> Provenance:
        """Origin of the data, see TrainingTask."""
        return self.pairs.provenance

    def make_model(self, backend: Backend) -> RecurrentModel:
        """Return a model with random weights; the backend of attention has no effect."""
        return RecurrentModel(self.config)

    def make_loss(self, model: RecurrentModel) -> nn.Module:
        """Return the loss of the next token, see TrainingTask."""
        return RecurrentLoss(model)

    def batches(self, part: Part, seed: int) -> PlannedBatches[Batch]:
        """Return the batches of one epoch, see TrainingTask."""
        return self.pairs.batches(part, seed)

    def scores(self, model: RecurrentModel, part: Part) -> dict[str, float]:
        """Return no measures; exact_match decodes the test parts."""
        return {}


@dataclass(frozen=True, slots=True)
class OpenRecurrent:
    """Trainer's `open_task` for an LSTM of this shape, see RecurrentTask; it can be sent to another process."""

    shape: Mapping[str, object]

    def __call__(self, recipe: Recipe, folders: RunFolders) -> RecurrentTask:
        """Return the task of a recipe."""
        return RecurrentTask(recipe, folders, self.shape)


def load_recurrent(path: Path) -> RecurrentModel:
    """Read the model of a checkpoint that Trainer wrote, in evaluation mode. Raises CheckpointError naming the file."""
    model = RecurrentModel(read_config(path / "config.json", RecurrentConfig))
    load_weights(model, path / "model.safetensors")
    return model.eval()
