"""Pre-training of an encoder: masked tokens and next-sentence prediction (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from antiphon.model.bundle.manifest import Provenance
from antiphon.model.checkpoints.checkpoint import CheckpointError
from antiphon.model.config import ModelConfig
from antiphon.model.head_config import HeadConfig, Task
from antiphon.model.ops.attention import Backend
from antiphon.model.text import word_piece
from antiphon.model.text.template import fill
from antiphon.model.text.tokenizer import MASK_TOKEN, Tokenizer, encoder_format
from antiphon.model.training.data.encoder_data import EncoderBatch, EncoderExample, collate
from antiphon.model.training.data.masking import Masking
from antiphon.model.training.data.sentence_pairs import Document, sentence_pairs
from antiphon.model.training.data.text_files import Part, is_held_out, read_documents, read_texts
from antiphon.model.training.data.translation_data import plan_lengths
from antiphon.model.training.recipe import PretrainRecipe, RecipeError
from antiphon.model.training.tasks.encoder_loss import EncoderLoss, label_accuracy
from antiphon.model.training.tasks.training_task import RunFolders, provenance_of, run_tokenizer, start_model
from antiphon.model.transformer.transformer import Transformer

VALID_PER_MILLE = 10
IS_NEXT, NOT_NEXT = 0, 1


def pretraining_heads(width: int, *, pairs: bool) -> list[HeadConfig]:
    """Return BERT's heads: fill_mask, and next_sentence if `pairs`. width: outputs of the transforms."""
    heads = [HeadConfig(task="fill_mask", transform_width=width, activation="gelu", norm=True, tied=True)]
    if pairs:
        labels = ("is_next", "not_next")
        heads.append(HeadConfig(task="next_sentence", labels=labels, transform_width=width, activation="tanh"))
    return heads


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedBatches:
    """Planned batches of one epoch; the seed and the batch's index decide which tokens are masked."""

    examples: Sequence[EncoderExample]
    plan: list[list[int]]
    seed: int
    masking: Masking
    tasks: tuple[Task, ...]
    config: ModelConfig
    batch_tokens: int

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> EncoderBatch:
        chosen = [self.examples[i] for i in self.plan[index]]
        batch = collate(chosen, self.tasks, self.config.pad_id, self.batch_tokens, self.config.max_source_len)
        ids, labels = self.masking.apply(batch.ids, hash((self.seed, index)))
        return replace(batch, ids=ids, labels={**batch.labels, "fill_mask": labels})


class PretrainTask:
    """TrainingTask that learns from texts; an initial checkpoint gives tokenizer, shape and weights with heads."""

    def __init__(self, recipe: PretrainRecipe, folders: RunFolders) -> None:
        self.recipe = recipe
        self.folders = folders
        data = recipe.data
        texts = list(dict.fromkeys(text for file in data.sentences for text in read_texts(folders.data, file)))
        documents = [document for file in data.ordered for document in read_documents(folders.data, file)]
        new_format = word_piece.FORMAT if recipe.tokenizer == "word_piece" else None
        self.tokenizer = run_tokenizer(folders, lambda: self._train_tokenizer(texts, documents), new_format)
        self.text = new_format or encoder_format(self.tokenizer) if folders.init is None else folders.init.text
        self.config = self._config()
        self.tasks = tuple(head.task for head in self.config.heads)
        self.num_losses = len(self.tasks)
        self.sentences = self._encode(texts)
        self.documents = self._split_documents(documents)
        self.masking = self._masking()

    def _train_tokenizer(self, texts: Sequence[str], documents: Sequence[Sequence[str]]) -> Tokenizer:
        all_texts = [*texts, *(sentence for document in documents for sentence in document)]
        if self.recipe.tokenizer == "word_piece":
            return Tokenizer.train_word_piece(all_texts, self.recipe.vocab_size)
        return Tokenizer.train(all_texts, self.recipe.vocab_size, extra_special=[MASK_TOKEN])

    def _config(self) -> ModelConfig:
        init = self.folders.init
        if init is None:
            plain = self.recipe.model_config_for(self.tokenizer.vocab_size)
            heads = pretraining_heads(plain.d_model, pairs=bool(self.recipe.data.ordered))
            return self.recipe.model_config_for(self.tokenizer.vocab_size, heads)
        kept = tuple(head for head in init.config.heads if head.task in ("fill_mask", "next_sentence"))
        if "fill_mask" not in [head.task for head in kept]:
            raise CheckpointError("--init: the model has no fill_mask head; pre-training needs one")
        return ModelConfig.model_validate({**init.config.model_dump(), "heads": kept})

    def _masking(self) -> Masking:
        mask_id = self.text.mask_id
        if mask_id is None:
            raise CheckpointError(f"{self.folders.run}: the vocabulary has no mask token")
        return Masking(
            self.recipe.masking,
            vocab_size=self.tokenizer.vocab_size,
            special_ids=self.text.special_ids,
            mask_id=mask_id,
        )

    def _encode(self, texts: Sequence[str]) -> dict[Part, list[EncoderExample]]:
        """Return the examples of single texts, truncated to the model's length, for training and validation."""
        limit = self.config.max_source_len - len(self.text.template) + 1
        parts: dict[Part, list[EncoderExample]] = {"train": [], "valid": []}
        for text, ids in zip(texts, self.tokenizer.encode_batch(texts), strict=True):
            if ids:
                filled, type_ids = fill(self.text, ids[:limit])
                example = EncoderExample(ids=filled, type_ids=type_ids, labels={})
                parts["valid" if is_held_out(text, VALID_PER_MILLE) else "train"].append(example)
        return parts

    def _split_documents(self, documents: Sequence[Sequence[str]]) -> dict[Part, list[Document]]:
        """Return the documents as tokens; each document belongs to one part as a whole. Raises RecipeError."""
        parts: dict[Part, list[Document]] = {"train": [], "valid": []}
        for document in documents:
            part: Part = "valid" if is_held_out(" ".join(document), VALID_PER_MILLE) else "train"
            parts[part].append([ids for ids in self.tokenizer.encode_batch(document) if ids])
        if documents and min(len(found) for found in parts.values()) < 2:
            raise RecipeError(f"data.ordered has {len(documents)} documents: too few for training and validation parts")
        return parts

    def _pairs(self, part: Part, seed: int) -> list[EncoderExample]:
        if not self.documents[part] or "next_sentence" not in self.tasks or self.text.pair_template is None:
            return []
        limit = self.config.max_source_len - len(self.text.pair_template) + 2
        examples = []
        for pair in sentence_pairs(self.documents[part], limit, seed):
            ids, type_ids = fill(self.text, pair.first, pair.second)
            label = IS_NEXT if pair.is_next else NOT_NEXT
            examples.append(EncoderExample(ids=ids, type_ids=type_ids, labels={"next_sentence": label}))
        return examples

    @property
    def provenance(self) -> Provenance:
        """Origin of data and initial weights, see TrainingTask."""
        return provenance_of(self.recipe, self.folders.init)

    def make_model(self, backend: Backend) -> Transformer:
        """Return the model to train, see TrainingTask."""
        return start_model(self.config, backend, self.folders)

    def make_loss(self, model: Transformer) -> nn.Module:
        """Return the loss of all heads, see TrainingTask."""
        return EncoderLoss(model)

    def batches(self, part: Part, seed: int) -> MaskedBatches:
        """Return the batches of one epoch, see TrainingTask; there is no test part."""
        examples = [*self.sentences[part], *self._pairs(part, seed)]
        batch_tokens = self.recipe.train.batch_tokens
        return MaskedBatches(
            examples=examples,
            plan=plan_lengths([(len(e.ids), 0) for e in examples], batch_tokens, seed),
            seed=seed,
            masking=self.masking,
            tasks=self.tasks,
            config=self.config,
            batch_tokens=batch_tokens,
        )

    def scores(self, model: Transformer, part: Part) -> dict[str, float]:
        """Return the accuracy of each head on the validation part."""
        if part != "valid":
            return {}
        batches = self.batches(part, 0)
        return label_accuracy(model, (batches[index] for index in range(len(batches))))
