"""Training of a translation model: batches of sentence pairs, and the loss of the next target token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.errors import CheckpointError
from antiphon.text.tokenizer import Tokenizer, byte_bpe_format
from antiphon.training.data.corpus import Pair, joined_corpus, load_collections, load_corpus
from antiphon.training.data.pair_epochs import RepeatedPairs, epoch_pairs
from antiphon.training.data.text_files import Part
from antiphon.training.data.token_splitting import TokenSplitter
from antiphon.training.data.translation_data import (
    IGNORED_LABEL,
    Batch,
    Example,
    collate,
    encode_pairs,
    plan_batches,
    rows_of,
)
from antiphon.training.recipe import Augmentation, Recipe
from antiphon.training.tasks.loss import linear_cross_entropy
from antiphon.training.tasks.training_task import RunFolders, TransformerTask, run_tokenizer
from antiphon.transformer.transformer import Transformer


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


class TranslationTask(TransformerTask[Recipe]):
    """TrainingTask of translation; an initial checkpoint replaces the recipe's tokenizer, shape and weights."""

    num_losses = 1

    def __init__(self, recipe: Recipe, folders: RunFolders) -> None:
        self.recipe = recipe
        self.folders = folders
        self._read_pairs()
        self.tokenizer = run_tokenizer(folders, self._train_tokenizer)
        self.text = byte_bpe_format(self.tokenizer)
        self.config = self._config()
        self._splitter = TokenSplitter(self.tokenizer, recipe.augmentation.split_tokens)
        changes = recipe.augmentation != Augmentation()
        self._train_varies = changes or any(part.repeat != 1 for part in self._repeated)
        self.examples: dict[Part, list[Example]] = {
            "train": [] if self._train_varies else self._encoded(self._corpus.train),
            "valid": self._encoded(self._corpus.valid),
            "test": self._encoded(self._corpus.test),
        }

    def _read_pairs(self) -> None:
        data = self.recipe.data
        if data.collections:
            corpora = load_collections(data, self.folders.data)
            self._corpus = joined_corpus(list(corpora.values()))
            self._repeated = [
                RepeatedPairs(pairs=corpora[file.name].train, repeat=file.repeat, in_order=file.in_order)
                for file in data.collections
            ]
        else:
            self._corpus = load_corpus(data, self.folders.data)
            self._repeated = [RepeatedPairs(pairs=self._corpus.train)]

    def _train_tokenizer(self) -> Tokenizer:
        pairs = epoch_pairs(self._repeated, Augmentation(), seed=0)
        return Tokenizer.train([text for pair in pairs for text in pair], self.recipe.vocab_size)

    def _examples(self, part: Part, seed: int) -> list[Example]:
        """Return the examples of a part; the seed draws those of training if they differ between epochs."""
        if part != "train" or not self._train_varies:
            return self.examples[part]
        examples = self._encoded(epoch_pairs(self._repeated, self.recipe.augmentation, seed))
        sources = self._splitter.split([example.source for example in examples], 2 * seed)
        targets = self._splitter.split([example.target for example in examples], 2 * seed + 1)
        return [
            Example(source=source, target=target)
            for source, target in zip(sources, targets, strict=True)
            if len(source) <= self.config.max_source_len and len(target) < self.config.max_target_len
        ]

    def _encoded(self, pairs: Sequence[Pair]) -> list[Example]:
        config = self.config
        return encode_pairs(pairs, self.tokenizer, max_source=config.max_source_len, max_target=config.max_target_len)

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

    def make_loss(self, model: Transformer) -> nn.Module:
        """Return the loss of the next token, see TrainingTask."""
        return BatchLoss(model)

    def batches(self, part: Part, seed: int) -> PairBatches:
        """Return the batches of one epoch, see TrainingTask."""
        batch_tokens = self.recipe.train.batch_tokens
        examples = self._examples(part, seed)
        return PairBatches(
            examples=examples,
            plan=plan_batches(examples, batch_tokens, seed),
            tokenizer=self.tokenizer,
            config=self.config,
            batch_tokens=batch_tokens,
        )

    def scores(self, model: Transformer, part: Part) -> dict[str, float]:
        """Return no measures; `antiphon evaluate` translates the test part."""
        return {}
