"""Conversion of BIO tags between words and their tokens, by offsets. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.training.data.text_files import Tagged

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
    found: list[int | None] = []
    word, start = 0, 0
    for begin, end in offsets:
        while word < len(words) and begin >= start + len(words[word]):
            start += len(words[word]) + 1
            word += 1
        found.append(word if word < len(words) and end > max(start, begin) else None)
    return found


def first_tags(words: Sequence[int | None], tags: Sequence[str], num_words: int) -> list[str]:
    """Return the tag of each word: that of its first token, or OUTSIDE if it has no token."""
    first: dict[int | None, str] = {}
    for word, tag in zip(words, tags, strict=True):
        first.setdefault(word, tag)
    return [first.get(word, OUTSIDE) for word in range(num_words)]
