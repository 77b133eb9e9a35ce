"""Training of a translation model: batches of sentence pairs, and the loss of the next target token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from antiphon.model.bundle.manifest import Provenance
from antiphon.model.checkpoints.checkpoint import CheckpointError
from antiphon.model.config import ModelConfig
from antiphon.model.ops.attention import Backend
from antiphon.model.text.tokenizer import Tokenizer, byte_bpe_format
from antiphon.model.training.data.corpus import load_corpus
from antiphon.model.training.data.text_files import Part
from antiphon.model.training.data.translation_data import (
    IGNORED_LABEL,
    Batch,
    Example,
    collate,
    encode_pairs,
    plan_batches,
    rows_of,
)
from antiphon.model.training.recipe import Recipe
from antiphon.model.training.tasks.loss import linear_cross_entropy
from antiphon.model.training.tasks.training_task import RunFolders, provenance_of, run_tokenizer, start_model
from antiphon.model.transformer.transformer import Transformer


class BatchLoss(nn.Module):
    """Loss of a batch; logits are computed only for labelled positions."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, smoothing: float) -> Tensor:
        """Return the summed label-smoothed cross entropy of the labelled positions, [1], in nats.

        Vaswani et al. 2017, section 5.4.
        """
        model = self.model
        cross_kv = model.project_memory(model.encode(batch.source, batch.source_lens))
        hidden = model.decode(batch.inputs, cross_kv, batch.source_lens)
        return labelled_loss(hidden, batch, model.output, smoothing)


def labelled_loss(hidden: Tensor, batch: Batch, output: nn.Linear, smoothing: float) -> Tensor:
    """Return the summed label-smoothed cross entropy of the labelled positions of hidden [B, T, M], [1], in nats."""
    is_labelled = batch.labels != IGNORED_LABEL
    loss = linear_cross_entropy(
        hidden[is_labelled], output.weight, batch.labels[is_labelled], smoothing=smoothing, bias=output.bias
    )
    return loss[None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairBatches:
    """Planned batches of one epoch of sentence pairs."""

    examples: Sequence[Example]
    plan: list[list[int]]
    tokenizer: Tokenizer
    config: ModelConfig
    batch_tokens: int

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Batch:
        chosen = [self.examples[i] for i in self.plan[index]]
        rows = rows_of(max(len(e.target) for e in chosen) + 1, self.batch_tokens)
        return collate(chosen, self.tokenizer, rows).within(self.config.max_source_len, self.config.max_target_len)


class TranslationTask:
    """TrainingTask of translation; an initial checkpoint replaces the recipe's tokenizer, shape and weights."""

    num_losses = 1

    def __init__(self, recipe: Recipe, folders: RunFolders) -> None:
        self.recipe = recipe
        self.folders = folders
        corpus = load_corpus(recipe.data, folders.data)
        self.tokenizer = run_tokenizer(
            folders, lambda: Tokenizer.train([text for pair in corpus.train for text in pair], recipe.vocab_size)
        )
        self.text = byte_bpe_format(self.tokenizer)
        self.config = self._config()
        limits = dict(max_source=self.config.max_source_len, max_target=self.config.max_target_len)
        self.examples: dict[Part, list[Example]] = {
            "train": encode_pairs(corpus.train, self.tokenizer, **limits),
            "valid": encode_pairs(corpus.valid, self.tokenizer, **limits),
            "test": encode_pairs(corpus.test, self.tokenizer, **limits),
        }

    def _config(self) -> ModelConfig:
        init = self.folders.init
        if init is None:
            return self.recipe.model_config_for(self.tokenizer.vocab_size)
        if init.config.architecture != "encoder-decoder" or init.text.kind != "byte_bpe":
            raise CheckpointError(
                f"--init: architecture={init.config.architecture!r}, texts of kind {init.text.kind!r}: "
                "only encoder-decoder models that were trained by `antiphon train` can be trained further"
            )
        return init.config

    @property
    def provenance(self) -> Provenance:
        """Origin of data and initial weights, see TrainingTask."""
        return provenance_of(self.recipe, self.folders.init)

    def make_model(self, backend: Backend) -> Transformer:
        """Return the model to train, see TrainingTask."""
        return start_model(self.config, backend, self.folders)

    def make_loss(self, model: Transformer) -> nn.Module:
        """Return the loss of the next token, see TrainingTask."""
        return BatchLoss(model)

    def batches(self, part: Part, seed: int) -> PairBatches:
        """Return the batches of one epoch, see TrainingTask."""
        batch_tokens = self.recipe.train.batch_tokens
        return PairBatches(
            examples=self.examples[part],
            plan=plan_batches(self.examples[part], batch_tokens, seed),
            tokenizer=self.tokenizer,
            config=self.config,
            batch_tokens=batch_tokens,
        )

    def scores(self, model: Transformer, part: Part) -> dict[str, float]:
        """Return no measures; `antiphon evaluate` translates the test part."""
        return {}
