"""Scores of predictions for training and for bundles: F1 of entities from BIO tags, loss of a text. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.training.corpus import Tagged

OUTSIDE = "O"


def inside(tag: str) -> str:
    """Return the tag of the tokens after the first one in a word with this tag."""
    return tag if tag == OUTSIDE else f"I-{tag[2:]}"


def token_tags(item: Tagged, offsets: Sequence[tuple[int, int]]) -> list[str | None]:
    """Return the tag of each token: a word's first token has the word's tag, its other tokens have `inside` of it.

    None for a token outside all words. Devlin et al. 2019 (section 5.3) train only first tokens. But served texts have
    no word boundaries, and clients can split words differently from the training data, so every token needs a tag.
    """
    tags: list[str | None] = []
    before: int | None = None
    for word in words_of_tokens(item.words, offsets):
        tags.append(None if word is None else inside(item.tags[word]) if word == before else item.tags[word])
        before = word
    return tags


def words_of_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[int | None]:
    """Return the index of the first word that each token overlaps, or None.

    offsets: code points [start, end) of each token in the words joined by spaces.
    """
    indices: list[int | None] = []
    word, start = 0, 0
    for begin, end in offsets:
        while word < len(words) and begin >= start + len(words[word]):
            start += len(words[word]) + 1
            word += 1
        indices.append(word if word < len(words) and end > max(start, begin) else None)
    return indices


def first_tags(words: Sequence[int | None], tags: Sequence[str], num_words: int) -> list[str]:
    """Return the tag of each word: that of its first token, or OUTSIDE if it has no token."""
    first: dict[int | None, str] = {}
    for word, tag in zip(words, tags, strict=True):
        first.setdefault(word, tag)
    return [first.get(word, OUTSIDE) for word in range(num_words)]


Span = tuple[int, int, str]
"""First word, end (exclusive), label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanScore:
    """Numbers of expected, found and correct spans. Precision, recall and F1 are from 0 to 1, and 0 without spans."""

    expected: int
    found: int
    right: int

    @property
    def precision(self) -> float:
        """Share of the found spans that are correct."""
        return self.right / self.found if self.found else 0.0

    @property
    def recall(self) -> float:
        """Share of the expected spans that were found."""
        return self.right / self.expected if self.expected else 0.0

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        total = self.expected + self.found
        return 2 * self.right / total if total else 0.0


def spans(tags: Sequence[str]) -> list[Span]:
    """Return the spans of one sentence; B- starts a span, and I- too after a tag with another label (conlleval)."""
    ended: list[Span] = []
    start, label = 0, ""
    for position, tag in enumerate([*tags, "O"]):
        kind, _, of = tag.partition("-")
        if label and (kind != "I" or of != label):
            ended.append((start, position, label))
            label = ""
        if of and not label:
            start, label = position, of
    return ended


def span_score(expected: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> SpanScore:
    """Compare tags of the same sentences. Raises ValueError if the numbers of sentences or words differ."""
    for reference, tags in zip(expected, predicted, strict=True):
        if len(reference) != len(tags):
            raise ValueError(f"{len(tags)} tags for {len(reference)} words")
    pairs = [(set(spans(a)), set(spans(b))) for a, b in zip(expected, predicted, strict=True)]
    return SpanScore(
        expected=sum(len(a) for a, _ in pairs),
        found=sum(len(b) for _, b in pairs),
        right=sum(len(a & b) for a, b in pairs),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLoss:
    """Loss of the predicted tokens of a text.

    nats: summed negative log-likelihood. num_characters, num_bytes: size of the predicted tokens' text in UTF-8.
    """

    nats: float
    num_characters: int
    num_bytes: int

    @property
    def nats_per_character(self) -> float:
        """Loss per character, in nats."""
        return self.nats / max(1, self.num_characters)

    @property
    def bits_per_byte(self) -> float:
        """Loss per byte of UTF-8, in bits."""
        return self.nats / math.log(2) / max(1, self.num_bytes)


def text_loss(nats: float, predicted: bytes) -> TextLoss:
    """Return the loss of predicted UTF-8 bytes; a character counts where its first byte is."""
    num_characters = sum(byte & 0xC0 != 0x80 for byte in predicted)
    return TextLoss(nats=nats, num_characters=num_characters, num_bytes=len(predicted))
