"""Examples of pre-training: single texts, and passages of documents, whose tokens are copied only when needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.text.format import TextFormat
from antiphon.text.template import fill
from antiphon.training.data.encoder_data import EncoderExample
from antiphon.training.data.sentence_pairs import SentencePair
from antiphon.training.data.sentence_runs import SentenceRun
from antiphon.training.data.token_documents import TokenDocuments

IS_NEXT, NOT_NEXT = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainExamples:
    """Single texts, then passages of documents. Pairs need a text format with pair_template."""

    texts: Sequence[EncoderExample]
    passages: Sequence[SentencePair] | Sequence[SentenceRun]
    documents: TokenDocuments
    text: TextFormat

    def __len__(self) -> int:
        return len(self.texts) + len(self.passages)

    def __getitem__(self, index: int) -> EncoderExample:
        if index < len(self.texts):
            return self.texts[index]
        passage = self.passages[index - len(self.texts)]
        ids, type_ids = fill(self.text, *passage.tokens(self.documents))
        if isinstance(passage, SentenceRun):
            return EncoderExample(ids=ids, type_ids=type_ids, labels={})
        label = IS_NEXT if passage.is_next else NOT_NEXT
        return EncoderExample(ids=ids, type_ids=type_ids, labels={"next_sentence": label})

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each example, with special tokens."""
        lengths = [len(example.ids) for example in self.texts]
        for passage in self.passages:
            is_run = isinstance(passage, SentenceRun)
            around = len(self.text.template) - 1 if is_run else len(self.text.pair_template or ()) - 2
            lengths.append(len(passage) + around)
        return lengths
