"""Fine-tuning of a trained encoder for labels of texts (classify) or of words (tag).

Devlin et al. 2019, sections 3.2 and 5.3. Encoder and head are trained, or only the new head with a frozen encoder.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import HeadConfig
from antiphon.errors import CheckpointError, RecipeError
from antiphon.ops.attention import Backend
from antiphon.text.format import fill, num_before
from antiphon.training.batches import IGNORED_LABEL, EncoderBatch, EncoderExample, PlannedBatches, collate, plan_lengths
from antiphon.training.corpus import Labelled, Part, Tagged, read_labelled, read_parts, read_tagged
from antiphon.training.losses import EncoderLoss, label_accuracy
from antiphon.training.recipe import FineTuneRecipe
from antiphon.training.scores import OUTSIDE, first_tags, inside, span_score, token_tags, words_of_tokens
from antiphon.training.task import RunFolders, TransformerTask, run_tokenizer
from antiphon.transformer.transformer import Transformer

Item = TypeVar("Item", bound=Labelled | Tagged)


def few_examples(items: Sequence[Item], count: int, seed: int) -> list[Item]:
    """Return at most `count` of the items in their order; seed and text decide which.

    Labels of texts take turns, so that their numbers differ by at most one as long as each label has enough texts.
    Sentences with tags are drawn without regard to their tags. A smaller count gives a part of a larger one.
    """
    order = sorted(range(len(items)), key=lambda index: _draw(items[index].text, seed))
    counts: Counter[str] = Counter()
    turns = []
    for index in order:
        label = _label(items[index])
        turns.append(counts[label])
        counts[label] += 1
    by_turn = [index for _, index in sorted(zip(turns, order, strict=True), key=lambda pair: pair[0])]
    return [items[index] for index in sorted(by_turn[:count])]


def _label(item: Labelled | Tagged) -> str:
    return item.label if isinstance(item, Labelled) else ""


def _draw(text: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}|{text}".encode()).digest()


class FineTuneTask(TransformerTask[FineTuneRecipe]):
    """TrainingTask with the initial checkpoint's encoder and one new head."""

    def __init__(self, recipe: FineTuneRecipe, folders: RunFolders) -> None:
        init = folders.init
        if init is None:
            raise RecipeError(f"recipe {recipe.name!r} has task {recipe.task!r}: --init must name the encoder to train")
        if init.config.architecture != "encoder":
            raise CheckpointError(f"--init: architecture={init.config.architecture!r}; it must be 'encoder'")
        self.recipe = recipe
        self.folders = folders
        self.init = init
        self.text = init.text
        self.tokenizer = run_tokenizer(folders, lambda: init.tokenizer)
        self.items: dict[Part, Sequence[Labelled | Tagged]] = {
            **(
                read_parts(folders.data, recipe.data, read_labelled)
                if recipe.task == "classify"
                else read_parts(folders.data, recipe.data, read_tagged)
            )
        }
        self.labels = self._labels()
        self.config = self._config()
        if recipe.data.max_train_examples is not None:
            count, seed = recipe.data.max_train_examples, recipe.train.seed
            self.items["train"] = few_examples(self.items["train"], count, seed)
        self.examples = {part: [self._encode(item) for item in items] for part, items in self.items.items()}

    def _labels(self) -> tuple[str, ...]:
        """Return the sorted labels of the whole training part, O first. Raises RecipeError if another part has more."""
        labels = {part: {label for item in items for label in _labels_of(item)} for part, items in self.items.items()}
        for part, names in labels.items():
            if unknown := sorted(names - labels["train"]):
                raise RecipeError(f"data.{part} has labels that data.train does not have: {', '.join(unknown[:5])}")
        return tuple(sorted(labels["train"], key=lambda label: (label != OUTSIDE, label)))

    def _config(self) -> ModelConfig:
        config = self.init.config
        transform = dict(transform_width=config.d_model, activation="tanh") if self.recipe.task == "classify" else {}
        head = HeadConfig.model_validate(dict(task=self.recipe.task, labels=self.labels, **transform))
        dropout = config.dropout if self.recipe.dropout is None else self.recipe.dropout
        return ModelConfig.model_validate({**config.model_dump(), "heads": (head,), "dropout": dropout})

    @property
    def _max_text_tokens(self) -> int:
        """Maximum number of a text's own tokens, without the template's."""
        return self.config.max_source_len - len(self.text.template) + 1

    def _encode(self, item: Labelled | Tagged) -> EncoderExample:
        """Return the source tokens of a text, truncated to the model's length, with the label or the tags."""
        limit = self._max_text_tokens
        if isinstance(item, Labelled):
            ids, type_ids = fill(self.text, self.tokenizer.encode(item.text)[:limit])
            return EncoderExample(ids=ids, type_ids=type_ids, labels={"classify": self.labels.index(item.label)})
        encoding = self.tokenizer.encode_source(item.text)
        ids, type_ids = fill(self.text, encoding.ids[:limit])
        before = num_before(self.text)
        labels = [IGNORED_LABEL] * len(ids)
        for place, tag in enumerate(token_tags(item, encoding.offsets)[:limit], start=before):
            if tag is not None:
                labels[place] = self.labels.index(tag)
        return EncoderExample(ids=ids, type_ids=type_ids, labels={"tag": labels})

    def make_model(self, backend: Backend) -> Transformer:
        """Return the model to train, see TrainingTask.

        The head's output layer is always new. For texts the dense layer before it continues from that of the
        pre-trained head for next sentences, if there is one: it is BERT's pooler.
        """
        model = Transformer(self.config, attention_backend=backend)
        if self.folders.keep_weights:
            assert model.encoder is not None
            assert self.init.model.encoder is not None
            model.encoder.load_state_dict(self.init.model.encoder.state_dict())
            if self.recipe.task == "classify" and "next_sentence" in self.init.model.heads:
                pooler = self.init.model.get_submodule("heads.next_sentence.transform")
                model.get_submodule("heads.classify.transform").load_state_dict(pooler.state_dict())
        return model

    def make_loss(self, model: Transformer) -> nn.Module:
        """Return the loss of the head, see TrainingTask."""
        return EncoderLoss(model, freeze_encoder=self.recipe.freeze_encoder)

    def batches(self, part: Part, seed: int) -> PlannedBatches[EncoderBatch]:
        """Return the batches of one epoch, see TrainingTask."""
        examples, batch_tokens, config = self.examples[part], self.recipe.train.batch_tokens, self.config
        plan = plan_lengths([(len(e.ids), 0) for e in examples], batch_tokens, seed)

        def batch(index: int) -> EncoderBatch:
            chosen = [examples[i] for i in plan[index]]
            return collate(chosen, [self.recipe.task], config.pad_id, batch_tokens, config.max_source_len)

        return PlannedBatches(plan, batch)

    def scores(self, model: Transformer, part: Part) -> dict[str, float]:
        """Return the accuracy for texts; precision, recall and F1 of entities for words (span_f1.py)."""
        batches = self.batches(part, 0)
        if self.recipe.task == "classify":
            accuracy = label_accuracy(model, batches)
            return {"accuracy": accuracy["classify_accuracy"], "texts": len(self.items[part])}
        pairs = list(self._tags(model, part, batches))
        score = span_score([expected for expected, _ in pairs], [predicted for _, predicted in pairs])
        return {"precision": score.precision, "recall": score.recall, "f1": score.f1, "entities": score.expected}

    @torch.no_grad()
    def _tags(
        self, model: Transformer, part: Part, batches: PlannedBatches[EncoderBatch]
    ) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
        """Yield expected and predicted tags of each sentence; truncated words get the tag O."""
        device = next(model.parameters()).device
        before, limit = num_before(self.text), self._max_text_tokens
        for number, members in enumerate(batches.plan):
            batch = batches[number].to(device)
            states = model.encode(batch.ids, batch.lens, batch.type_ids)
            chosen = model.read_out("tag", states).argmax(dim=-1).tolist()
            for row, index in enumerate(members):
                item = self.items[part][index]
                assert isinstance(item, Tagged)
                words = words_of_tokens(item.words, self.tokenizer.encode_source(item.text).offsets)[:limit]
                tags = [self.labels[label] for label in chosen[row][before : before + len(words)]]
                yield item.tags, first_tags(words, tags, len(item.words))


def _labels_of(item: Labelled | Tagged) -> tuple[str, ...]:
    """Return the labels that an item needs: its label, or its tags together with the I- tag of each B- tag."""
    return (item.label,) if isinstance(item, Labelled) else (*item.tags, *(inside(tag) for tag in item.tags))
