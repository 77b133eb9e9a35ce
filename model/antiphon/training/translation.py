"""Training of a translation model: batches of sentence pairs, and the loss of the next target token.

The pairs of an epoch are the recipe's collections, repeated as it says and changed by its augmentation. One change is
random segmentations of byte-level BPE: tokens are replaced by the two tokens from which a merge made them. BPE-dropout
(Provilkov et al. 2020) leaves out merges while a text is segmented, with the tokenizer library's own random numbers,
which have no seed. Splitting what was segmented needs no text, works on a whole epoch at once, and depends on the seed
alone. A model that sees "Table" also as "Tab" + "le" learns what a rare word has in common with its parts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.errors import CheckpointError
from antiphon.text.tokenizer import Tokenizer, byte_bpe_format
from antiphon.training.batches import IGNORED_LABEL, PlannedBatches, TargetBatch, plan_lengths, rounded, rows_of
from antiphon.training.corpus import Pair, Part, joined_corpus, load_collections, load_corpus
from antiphon.training.losses import linear_cross_entropy
from antiphon.training.recipe import Augmentation, Recipe
from antiphon.training.task import RunFolders, TransformerTask, run_tokenizer
from antiphon.transformer.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """Token ids of one pair: source with end token, target without begin and end tokens."""

    source: list[int]
    target: list[int]


def encode_pairs(pairs: Sequence[Pair], tokenizer: Tokenizer, *, max_source: int, max_target: int) -> list[Example]:
    """Tokenise pairs; empty ones and those beyond max_source or max_target tokens (with end token) are left out."""
    sources = tokenizer.encode_batch([source for source, _ in pairs])
    targets = tokenizer.encode_batch([target for _, target in pairs])
    return [
        Example(source=[*source, tokenizer.eos_id], target=target)
        for source, target in zip(sources, targets, strict=True)
        if source and target and len(source) < max_source and len(target) < max_target
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch(TargetBatch):
    """Padded tensors: source [B, S] int64, source_lens [B] int32, inputs and labels of the target."""

    source: Tensor
    source_lens: Tensor

    def within(self, max_source: int, max_target: int) -> Batch:
        """Return the batch without columns beyond these lengths; they are padding if no example is longer."""
        return Batch(
            source=self.source[:, :max_source],
            source_lens=self.source_lens,
            inputs=self.inputs[:, :max_target],
            labels=self.labels[:, :max_target],
        )


def collate(examples: Sequence[Example], tokenizer: Tokenizer, rows: int | None = None) -> Batch:
    """Pad examples to one batch; decoder inputs start with the begin token, labels end with the end token.

    Lengths are rounded up to LENGTH_STEP. If there are fewer examples than `rows`, rows without labels are added.
    """
    rows = rows or len(examples)
    source_lens = torch.ones(rows, dtype=torch.int32)
    source_lens[: len(examples)] = torch.tensor([len(e.source) for e in examples], dtype=torch.int32)
    source = torch.full((rows, rounded(int(source_lens.max()))), tokenizer.pad_id)
    target_len = rounded(max(len(e.target) for e in examples) + 1)
    inputs = torch.full((rows, target_len), tokenizer.pad_id)
    labels = torch.full((rows, target_len), IGNORED_LABEL)
    for row, example in enumerate(examples):
        target = torch.tensor(example.target)
        source[row, : len(example.source)] = torch.tensor(example.source)
        inputs[row, 0] = tokenizer.bos_id
        inputs[row, 1 : len(target) + 1] = target
        labels[row, : len(target)] = target
        labels[row, len(target)] = tokenizer.eos_id
    return Batch(source=source, source_lens=source_lens, inputs=inputs, labels=labels)


def plan_batches(examples: Sequence[Example], batch_tokens: int, seed: int) -> list[list[int]]:
    """Return the indices of each batch of one epoch: similar lengths, at most batch_tokens padded target tokens."""
    return plan_lengths([(len(e.target) + 1, len(e.source)) for e in examples], batch_tokens, seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedPairs:
    """Training pairs of one collection, with `repeat` and `in_order` of Collection."""

    pairs: Sequence[Pair]
    repeat: float = 1.0
    in_order: bool = False


def epoch_pairs(parts: Sequence[RepeatedPairs], augmentation: Augmentation, seed: int) -> list[Pair]:
    """Return the pairs of one epoch; they depend only on the arguments. `split_tokens` concerns tokens, not texts."""
    chance = random.Random(seed)
    return [
        _without_details(pair, augmentation, chance)
        for part in parts
        for pair in _joined(_drawn(part, chance), part, augmentation.joined, chance)
    ]


def _drawn(part: RepeatedPairs, chance: random.Random) -> list[int]:
    """Return indices: each as often as the whole part of `repeat`, and some of them once more for the fraction."""
    whole, fraction = divmod(part.repeat, 1)
    count = len(part.pairs)
    return [*range(count)] * int(whole) + sorted(chance.sample(range(count), round(fraction * count)))


def _joined(indices: Sequence[int], part: RepeatedPairs, share: float, chance: random.Random) -> list[Pair]:
    """Return the pairs of the indices; a share of them is followed by the next pair, or by any pair, in one text."""
    pairs = part.pairs
    joined: list[Pair] = []
    for index in indices:
        source, target = pairs[index]
        if chance.random() < share:
            other = index + 1 if part.in_order else chance.randrange(len(pairs))
            if other < len(pairs):
                source, target = f"{source} {pairs[other][0]}", f"{target} {pairs[other][1]}"
        joined.append((source, target))
    return joined


def _without_details(pair: Pair, augmentation: Augmentation, chance: random.Random) -> Pair:
    source, target = pair
    if chance.random() < augmentation.no_full_stop and source.endswith(".") and target.endswith("."):
        source, target = source[:-1], target[:-1]
    if chance.random() < augmentation.lower_case:
        source = source.lower()
    return source, target


class TokenSplitter:
    """Splits tokens of one tokenizer. Each token is split with probability `rate`, and so are its parts."""

    def __init__(self, tokenizer: Tokenizer, rate: float) -> None:
        self._rate = rate
        self._left = np.full(tokenizer.vocab_size, -1)
        self._right = np.full(tokenizer.vocab_size, -1)
        for merged, left, right in tokenizer.merges():
            self._left[merged], self._right[merged] = left, right

    def split(self, rows: Sequence[Sequence[int]], seed: int) -> list[list[int]]:
        """Return rows of token ids of the same texts with some tokens split."""
        chance = np.random.default_rng(seed)
        ids = np.fromiter((token for row in rows for token in row), dtype=np.int64)
        row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        is_open = np.ones(len(ids), dtype=bool)  # parts of a token that was not split stay whole
        while is_open.any():
            is_open &= (self._left[ids] >= 0) & (chance.random(len(ids)) < self._rate)
            ids, row_of, is_open = self._split_once(ids, row_of, is_open)
        ends = np.searchsorted(row_of, np.arange(len(rows)), side="right")
        return [part.tolist() for part in np.split(ids, ends[:-1])] if rows else []

    def _split_once(
        self, ids: NDArray[np.int64], row_of: NDArray[np.int64], is_split: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        times = np.where(is_split, 2, 1)
        second = np.cumsum(times)[is_split] - 1
        longer = np.repeat(ids, times)
        longer[second - 1] = self._left[ids[is_split]]
        longer[second] = self._right[ids[is_split]]
        return longer, np.repeat(row_of, times), np.repeat(is_split, times)


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


class TranslationTask(TransformerTask[Recipe]):
    """TrainingTask of translation; an initial checkpoint replaces the recipe's tokenizer, shape and weights.

    It has no scores: `antiphon evaluate` translates the test part.
    """

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

    def batches(self, part: Part, seed: int) -> PlannedBatches[Batch]:
        """Return the batches of one epoch, see TrainingTask."""
        batch_tokens, config = self.recipe.train.batch_tokens, self.config
        examples = self._examples(part, seed)
        plan = plan_batches(examples, batch_tokens, seed)

        def batch(index: int) -> Batch:
            chosen = [examples[i] for i in plan[index]]
            rows = rows_of(max(len(e.target) for e in chosen) + 1, batch_tokens)
            return collate(chosen, self.tokenizer, rows).within(config.max_source_len, config.max_target_len)

        return PlannedBatches(plan, batch)
