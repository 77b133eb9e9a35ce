"""Training of the LSTM on the batches of a translation recipe, and reading of its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError
from torch import Tensor, nn

from antiphon.bundle.manifest import Provenance
from antiphon.checkpoints.checkpoint import load_weights, read_config
from antiphon.errors import RecipeError
from antiphon.lab.recurrent.config import RecurrentConfig
from antiphon.lab.recurrent.lstm import RecurrentModel
from antiphon.ops.attention import Backend
from antiphon.text.tokenizer import Tokenizer
from antiphon.training.corpus import Part
from antiphon.training.recipe import Recipe
from antiphon.training.task import RunFolders
from antiphon.training.translation import Batch, PairBatches, TranslationTask, labelled_loss


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
        given = {name: getattr(self.pairs.config, name) for name in common}
        try:
            self.config = RecurrentConfig.model_validate({**shape, **given})
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

    def batches(self, part: Part, seed: int) -> PairBatches:
        """Return the batches of one epoch, see TrainingTask."""
        return self.pairs.batches(part, seed)

    def scores(self, model: RecurrentModel, part: Part) -> dict[str, float]:
        """Return no measures; exact_match.py decodes the test parts."""
        return {}


@dataclass(frozen=True, slots=True)
class OpenRecurrent:
    """Trainer's `open_task` for an LSTM of this shape, see RecurrentTask; it can be sent to another process."""

    shape: Mapping[str, object]

    def __call__(self, recipe: Recipe, folders: RunFolders) -> RecurrentTask:
        """Return the task of a recipe."""
        return RecurrentTask(recipe, folders, self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentCheckpoint:
    """An LSTM in evaluation mode with its tokenizer."""

    config: RecurrentConfig
    model: RecurrentModel
    tokenizer: Tokenizer


def load_recurrent(path: Path) -> RecurrentCheckpoint:
    """Read a checkpoint directory that Trainer wrote. Raises CheckpointError or TokenizerError naming the file."""
    config = read_config(path / "config.json", RecurrentConfig)
    model = RecurrentModel(config)
    load_weights(model, path / "model.safetensors")
    return RecurrentCheckpoint(config=config, model=model.eval(), tokenizer=Tokenizer.load(path / "tokenizer.json"))
