"""Examples of pre-training: single texts, and pairs of documents whose tokens are copied only when they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.model.text.format import TextFormat
from antiphon.model.text.template import fill
from antiphon.model.training.data.encoder_data import EncoderExample
from antiphon.model.training.data.sentence_pairs import SentencePair
from antiphon.model.training.data.token_documents import TokenDocuments

IS_NEXT, NOT_NEXT = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainExamples:
    """Single texts, then pairs. pairs need a text format with pair_template."""

    texts: Sequence[EncoderExample]
    pairs: Sequence[SentencePair]
    documents: TokenDocuments
    text: TextFormat

    def __len__(self) -> int:
        return len(self.texts) + len(self.pairs)

    def __getitem__(self, index: int) -> EncoderExample:
        if index < len(self.texts):
            return self.texts[index]
        pair = self.pairs[index - len(self.texts)]
        ids, type_ids = fill(self.text, *pair.tokens(self.documents))
        label = IS_NEXT if pair.is_next else NOT_NEXT
        return EncoderExample(ids=ids, type_ids=type_ids, labels={"next_sentence": label})

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each example, with special tokens."""
        around = len(self.text.pair_template or ()) - 2
        return [*(len(example.ids) for example in self.texts), *(len(pair) + around for pair in self.pairs)]
