"""BIO tags of words and of the tokens that words are made of. Torch-free; knows offsets and no vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.model.training.text_files import Tagged

OUTSIDE = "O"


def inside(tag: str) -> str:
    """The tag of what goes on with a word of this tag."""
    return tag if tag == OUTSIDE else f"I-{tag[2:]}"


def token_tags(item: Tagged, offsets: Sequence[tuple[int, int]]) -> list[str | None]:
    """The tag of each token: of a word's first token the word's, of its others what goes on with it.

    Devlin et al. (section 5.3) teach first tokens only. Served texts come without words: what a client takes for one
    word the training data may have split, or the other way round, so every token should know its tag.
    """
    tags: list[str | None] = []
    before: int | None = None
    for word in words_of_tokens(item.words, offsets):
        tags.append(None if word is None else inside(item.tags[word]) if word == before else item.tags[word])
        before = word
    return tags


def words_of_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[int | None]:
    """Index of the word that each token belongs to, the first it touches; offsets as in the words joined by spaces."""
    found: list[int | None] = []
    word, start = 0, 0
    for begin, end in offsets:
        while word < len(words) and begin >= start + len(words[word]):
            start += len(words[word]) + 1
            word += 1
        found.append(word if word < len(words) and end > max(start, begin) else None)
    return found


def first_tags(words: Sequence[int | None], tags: Sequence[str], num_words: int) -> list[str]:
    """Tags of words: of each the tag of its first token, OUTSIDE where it has none."""
    first: dict[int | None, str] = {}
    for word, tag in zip(words, tags, strict=True):
        first.setdefault(word, tag)
    return [first.get(word, OUTSIDE) for word in range(num_words)]
