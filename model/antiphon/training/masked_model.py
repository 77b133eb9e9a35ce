"""Pre-training of an encoder: masked tokens and next-sentence prediction (Devlin et al. 2019, section 3.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from antiphon.architecture.config import ModelConfig
from antiphon.architecture.heads import HeadConfig
from antiphon.errors import CheckpointError, RecipeError
from antiphon.ops.attention import Backend
from antiphon.text.format import fill
from antiphon.text.subwords import WORD_PIECE_FORMAT
from antiphon.text.tokenizer import MASK_TOKEN, Tokenizer, encoder_format
from antiphon.training.batches import IGNORED_LABEL, EncoderBatch, EncoderExample, PlannedBatches, collate, plan_lengths
from antiphon.training.corpus import Part, is_held_out, read_documents, read_texts
from antiphon.training.losses import EncoderLoss, label_accuracy
from antiphon.training.passages import Passage, TokenDocuments, sentence_pairs, sentence_runs
from antiphon.training.recipe import MaskingConfig, PretrainRecipe
from antiphon.training.task import RunFolders, TransformerTask, run_tokenizer
from antiphon.transformer.neighbour_start import start_at_neighbours
from antiphon.transformer.transformer import Transformer


class Masking:
    """The 80/10/10 rule for one vocabulary. Special tokens are never predicted and never used as replacement."""

    def __init__(self, config: MaskingConfig, *, vocab_size: int, special_ids: Iterable[int], mask_id: int) -> None:
        self.config = config
        self.mask_id = mask_id
        self.is_ordinary = torch.ones(vocab_size, dtype=torch.bool)
        self.is_ordinary[list(special_ids)] = False
        self.ordinary_ids = self.is_ordinary.nonzero().flatten()

    def apply(self, ids: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels, both [B, S] int64, of padded texts ids [B, S] int64; the seed decides all choices.

        In a row with n ordinary tokens round(rate n) of them are predicted, at least one if n > 0. Labels have their
        ids, and IGNORED_LABEL elsewhere. Inputs differ from ids only at predicted tokens.
        """
        chance = torch.Generator().manual_seed(seed)
        chosen = self._choose(self.is_ordinary[ids], chance)
        draw = torch.rand(ids.shape, generator=chance)
        drawn = self.ordinary_ids[torch.randint(len(self.ordinary_ids), ids.shape, generator=chance)]
        config = self.config
        is_masked = chosen & (draw < config.masked)
        is_random = chosen & (draw >= config.masked) & (draw < config.masked + config.random)
        inputs = ids.masked_fill(is_masked, self.mask_id).where(~is_random, drawn)
        return inputs, ids.where(chosen, IGNORED_LABEL)

    def _choose(self, ordinary: Tensor, chance: torch.Generator) -> Tensor:
        """Return a mask [B, S] bool of the predicted tokens, a random choice from the ordinary ones."""
        counts = ordinary.sum(dim=1)
        num_predicted = (counts * self.config.rate).round().long().clamp(min=1).minimum(counts)
        order = torch.rand(ordinary.shape, generator=chance).masked_fill(~ordinary, 2.0).argsort(dim=1)
        rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1]).expand_as(order))
        return rank < num_predicted[:, None]


IS_NEXT, NOT_NEXT = 0, 1


# Texts and documents of 1,000 that are held out for validation, and as many again for the final scores.
HELD_OUT_PER_MILLE = 10


def pretraining_heads(config: ModelConfig, *, pairs: bool) -> list[HeadConfig]:
    """Return BERT's heads: fill_mask with the embedding as output, and next_sentence if `pairs`."""
    width = config.resolved_embedding_width
    heads = [HeadConfig(task="fill_mask", transform_width=width, activation="gelu", norm=True, tied=True)]
    if pairs:
        labels = ("is_next", "not_next")
        heads.append(HeadConfig(task="next_sentence", labels=labels, transform_width=config.d_model, activation="tanh"))
    return heads


class PretrainTask(TransformerTask[PretrainRecipe]):
    """TrainingTask that learns from texts; an initial checkpoint gives tokenizer, shape and weights with heads.

    origin: checkpoint whose tokenizer and text format are used; None: the task trains a tokenizer.
    """

    def __init__(self, recipe: PretrainRecipe, folders: RunFolders) -> None:
        self.recipe = recipe
        self.folders = folders
        self.origin = folders.init or folders.teacher
        data = recipe.data
        texts = list(dict.fromkeys(text for file in data.sentences for text in read_texts(folders.data, file)))
        documents = [document for file in data.ordered for document in read_documents(folders.data, file)]
        new_format = WORD_PIECE_FORMAT if recipe.tokenizer == "word_piece" else None
        self.tokenizer = run_tokenizer(folders, lambda: self._train_tokenizer(texts, documents), new_format)
        self.text = new_format or encoder_format(self.tokenizer) if self.origin is None else self.origin.text
        self.config = self._config()
        self.tasks = tuple(head.task for head in self.config.heads)
        self.num_losses = len(self.tasks)
        self.num_special = len(self.text.template) - 1
        self.num_special_of_pair = len(self.text.pair_template or ()) - 2
        self.texts = self._encode(texts)
        self.documents = self._split_documents(documents)
        if self.text.mask_id is None:
            raise CheckpointError(f"{folders.run}: the vocabulary has no mask token")
        special_ids, mask_id = self.text.special_ids, self.text.mask_id
        vocab_size = self.tokenizer.vocab_size
        self.masking = Masking(recipe.masking, vocab_size=vocab_size, special_ids=special_ids, mask_id=mask_id)

    def _train_tokenizer(self, texts: Sequence[str], documents: Sequence[Sequence[str]]) -> Tokenizer:
        all_texts = [*texts, *(sentence for document in documents for sentence in document)]
        if self.recipe.tokenizer == "word_piece":
            return Tokenizer.train_word_piece(all_texts, self.recipe.vocab_size)
        return Tokenizer.train(all_texts, self.recipe.vocab_size, extra_special=[MASK_TOKEN])

    def _config(self) -> ModelConfig:
        init = self.folders.init
        if init is None:
            plain = self.recipe.model_config_for(self.tokenizer.vocab_size)
            heads = pretraining_heads(plain, pairs=self.recipe.has_pairs)
            return self.recipe.model_config_for(self.tokenizer.vocab_size, heads)
        learned = ("fill_mask", "next_sentence") if self.recipe.next_sentences else ("fill_mask",)
        kept = tuple(head for head in init.config.heads if head.task in learned)
        if "fill_mask" not in [head.task for head in kept]:
            raise CheckpointError("--init: the model has no fill_mask head; pre-training needs one")
        return ModelConfig.model_validate({**init.config.model_dump(), "heads": kept})

    def _encode(self, texts: Sequence[str]) -> dict[Part, list[EncoderExample]]:
        """Return the examples of single texts, truncated to the model's length, for each part."""
        limit = self.config.max_source_len - self.num_special
        parts: dict[Part, list[EncoderExample]] = {"train": [], "valid": [], "test": []}
        for text, ids in zip(texts, self.tokenizer.encode_batch(texts), strict=True):
            if ids:
                filled, type_ids = fill(self.text, ids[:limit])
                parts[_part_of(text)].append(EncoderExample(ids=filled, type_ids=type_ids, labels={}))
        return parts

    def _split_documents(self, documents: Iterable[Sequence[str]]) -> dict[Part, TokenDocuments]:
        """Return the documents as tokens; each document belongs to one part as a whole. Raises RecipeError."""
        parts: dict[Part, TokenDocuments] = {part: TokenDocuments() for part in ("train", "valid", "test")}
        for document in documents:
            parts[_part_of(" ".join(document))].append(self.tokenizer.encode_batch(document))
        counts = {part: len(tokens) for part, tokens in parts.items()}
        if sum(counts.values()) and min(counts.values()) < 2:
            raise RecipeError(
                f"data.ordered has {sum(counts.values())} documents: too few, each part needs at least two; "
                f"training {counts['train']}, validation {counts['valid']}, test {counts['test']}"
            )
        return parts

    def _passages(self, part: Part, seed: int) -> list[Passage]:
        documents = self.documents[part]
        if not self.recipe.next_sentences:
            return sentence_runs(documents, self.config.max_source_len - self.num_special)
        if not len(documents) or "next_sentence" not in self.tasks or self.text.pair_template is None:
            return []
        return sentence_pairs(documents, self.config.max_source_len - self.num_special_of_pair, seed)

    def _num_special_of(self, passage: Passage) -> int:
        return self.num_special if passage.is_next is None else self.num_special_of_pair

    def _filled(self, passage: Passage, part: Part) -> EncoderExample:
        """Return a passage with its special tokens; its tokens are copied only when it is needed."""
        first, *second = passage.parts(self.documents[part])
        ids, type_ids = fill(self.text, first, second[0] if second else None)
        label = IS_NEXT if passage.is_next else NOT_NEXT
        return EncoderExample(
            ids=ids, type_ids=type_ids, labels={} if passage.is_next is None else {"next_sentence": label}
        )

    def make_model(self, backend: Backend) -> Transformer:
        """Return the model to train, see TrainingTask."""
        model = super().make_model(backend)
        if self.recipe.neighbour_start and self.origin is None:
            assert model.encoder is not None
            start_at_neighbours(model.encoder)
        return model

    def make_loss(self, model: Transformer) -> nn.Module:
        """Return the loss of all heads, see TrainingTask."""
        return EncoderLoss(model)

    def batches(self, part: Part, seed: int) -> PlannedBatches[EncoderBatch]:
        """Return the batches of one epoch, see TrainingTask.

        The seed of a mask is that of the epoch with the batch's index. With data.masking.copies it is that of the copy
        with the index of each example, so that a text has the same mask in every batch.
        """
        copies, batch_tokens, config = self.recipe.masking.copies, self.recipe.train.batch_tokens, self.config
        mask_seed = seed if copies is None else seed % copies
        texts, passages = self.texts[part], self._passages(part, mask_seed)
        lengths = [len(text.ids) for text in texts]
        lengths += [len(passage) + self._num_special_of(passage) for passage in passages]
        plan = plan_lengths([(length, 0) for length in lengths], batch_tokens, seed)

        def example(number: int) -> EncoderExample:
            return texts[number] if number < len(texts) else self._filled(passages[number - len(texts)], part)

        def masked(number: int) -> EncoderExample:
            whole = example(number)
            ids, labels = self.masking.apply(torch.tensor([whole.ids]), hash((mask_seed, number)))
            return replace(whole, ids=ids[0].tolist(), labels={**whole.labels, "fill_mask": labels[0].tolist()})

        def batch(index: int) -> EncoderBatch:
            chosen = [example(i) if copies is None else masked(i) for i in plan[index]]
            made = collate(chosen, self.tasks, config.pad_id, batch_tokens, config.max_source_len)
            if copies is not None:
                return made
            ids, labels = self.masking.apply(made.ids, hash((mask_seed, index)))
            return replace(made, ids=ids, labels={**made.labels, "fill_mask": labels})

        return PlannedBatches(plan, batch)

    def scores(self, model: Transformer, part: Part) -> dict[str, float]:
        """Return the accuracy of each head: `fill_mask_accuracy`, and with documents `next_sentence_accuracy`."""
        return label_accuracy(model, self.batches(part, 0))


def _part_of(text: str) -> Part:
    if is_held_out(text, HELD_OUT_PER_MILLE):
        return "valid"
    return "test" if is_held_out(text, 2 * HELD_OUT_PER_MILLE) else "train"
