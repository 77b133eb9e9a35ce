"""Converts outputs of encoder heads to messages: labels, tagged tokens and spans, filled positions.

Knows scores and texts; no requests and no graphs.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from antiphon.domain.request import Readout
from antiphon.text.tokenizer import Tokenizer
from antiphon.v1 import inference_pb2 as pb

_OUTSIDE = "O"
# Scripts without spaces between words: Thai and Lao, Myanmar, Khmer, kana and ideographs. Each character is a word.
_UNSPACED = (
    range(0x0E00, 0x0F00),
    range(0x1000, 0x10A0),
    range(0x1780, 0x1800),
    range(0x2E80, 0xA000),
    range(0xF900, 0xFB00),
    range(0x20000, 0x40000),
)


def label_scores(readout: Readout, labels: Sequence[str], top_k: int) -> list[pb.LabelScore]:
    """Return labels with their scores, best first: `top_k` of them, or all if it is 0."""
    scores = readout.values[0].tolist()
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [pb.LabelScore(label=labels[index], score=scores[index]) for index in order[: top_k or None]]


def tagged_tokens(
    readout: Readout, labels: Sequence[str], token_ids: Sequence[int], offsets: Sequence[tuple[int, int]]
) -> list[pb.TaggedToken]:
    """Return the likeliest label of each token of a text; the first one of equal scores."""
    best = readout.values.argmax(axis=1).tolist()
    return [
        pb.TaggedToken(token_id=token_id, start=start, end=end, label=labels[index], score=float(scores[index]))
        for token_id, (start, end), index, scores in zip(token_ids, offsets, best, readout.values, strict=True)
    ]


def tagged_spans(text: str, tokens: Sequence[pb.TaggedToken]) -> list[pb.TaggedSpan]:
    """Return spans of neighbouring words with one label. B- or another label begins a new span; O is in no span."""
    spans: list[list[_Word]] = []
    before: _Word | None = None
    for word in _words(text, tokens):
        if word.label != _OUTSIDE:
            if before is not None and before.kind == word.kind and not word.label.startswith("B-"):
                spans[-1].append(word)
            else:
                spans.append([word])
        before = None if word.label == _OUTSIDE else word
    return [
        pb.TaggedSpan(
            start=words[0].start,
            end=words[-1].end,
            label=words[0].kind,
            score=sum(word.score for word in words) / len(words),
        )
        for words in spans
    ]


def masked_places(readout: Readout, positions: Sequence[int], tokenizer: Tokenizer) -> list[pb.MaskedPlace]:
    """Return the proposed tokens for each masked position, likeliest first."""
    assert readout.token_ids is not None
    return [
        pb.MaskedPlace(
            position=position,
            fillings=[
                pb.Filling(token_id=token_id, text=_text_of(token_id, tokenizer), score=score)
                for token_id, score in zip(ids, scores, strict=True)
            ],
        )
        for position, ids, scores in zip(positions, readout.token_ids.tolist(), readout.values.tolist(), strict=True)
    ]


@dataclass(kw_only=True, slots=True)
class _Word:
    """Word with the label of its first token."""

    start: int
    end: int
    label: str
    score: float

    @property
    def kind(self) -> str:
        """Label without its prefix B- or I-."""
        return self.label[2:] if self.label.startswith(("B-", "I-")) else self.label


def _words(text: str, tokens: Sequence[pb.TaggedToken]) -> Iterator[_Word]:
    """Yield the words that tokens are pieces of. Splits as BERT does: at spaces and around every punctuation mark."""
    word: _Word | None = None
    for token in tokens:
        start, end = _trimmed(text, token.start, token.end)
        if start == end:
            continue
        if word is not None and _is_inside(text, word.end, start):
            word.end = max(word.end, end)
            continue
        if word is not None:
            yield word
        word = _Word(start=start, end=end, label=token.label, score=token.score)
    if word is not None:
        yield word


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the bounds of a token without white space, which some vocabularies include in tokens."""
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def _is_inside(text: str, end: int, start: int) -> bool:
    """Return whether a token at `start` continues the word that ends at `end`. Byte tokens of one character do."""
    return start < end or (start == end and _is_word_char(text[end - 1]) and _is_word_char(text[start]))


def _is_word_char(char: str) -> bool:
    if any(ord(char) in script for script in _UNSPACED):
        return False
    return char.isalnum() or unicodedata.category(char).startswith("M")


def _text_of(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token's text, or its name if it has no text."""
    return tokenizer.decode([token_id]) or tokenizer.piece(token_id)
