"""A source as the model reads it: the tokens of one text or a pair with what their template puts around them.

Torch-free; knows ids, no texts and no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.model.text.format import Template, TextFormat


@dataclass(frozen=True, slots=True)
class LanguageIds:
    """Tokens of the languages of one request; None where none was named and the model has no default."""

    source: int | None = None
    target: int | None = None


class UnknownLanguageError(ValueError):
    """A language code that a model does not know.

    allowed: in words, what it may be.
    """

    def __init__(self, code: str, allowed: str) -> None:
        super().__init__(f"language {code!r} is not known; it must be {allowed}")
        self.allowed = allowed


def language_id(text: TextFormat, code: str, default: str | None) -> int | None:
    """Id of a language's token; empty takes the default's. Raises UnknownLanguageError."""
    if not code:
        return None if default is None else text.languages[default]
    if code not in text.languages:
        known = sorted(text.languages)
        shown = ", ".join(known[:30]) + (f" and {len(known) - 30} more, see GetModel" if len(known) > 30 else "")
        raise UnknownLanguageError(code, f"one of {shown}" if known else "empty: the model has no languages")
    return text.languages[code]


def fill(
    text: TextFormat,
    ids: Sequence[int],
    pair_ids: Sequence[int] | None = None,
    languages: LanguageIds | None = None,
    *,
    is_partly_filled: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Source tokens with what is put around them, and the token type of each.

    A language's place stays empty where none is known. is_partly_filled: ids that begin with all that the template puts
    before a text, or end with all that it puts behind, keep theirs and get no second one.
    Raises ValueError where a pair is given to a model that takes none.
    """
    template = text.template if pair_ids is None else text.pair_template
    if template is None:
        raise ValueError("the model takes single texts only")
    if is_partly_filled:
        ids = _bare(template, ids, languages or LanguageIds())
    filled: list[int] = []
    types: list[int] = []
    for place, element in enumerate(template):
        tokens = ids if element == "$text" else pair_ids if element == "$pair" else _around((element,), languages)
        filled.extend(tokens or ())
        is_second = pair_ids is not None and text.pair_start is not None and place >= text.pair_start
        types.extend([int(is_second)] * len(tokens or ()))
    return tuple(filled), tuple(types)


def num_before(text: TextFormat, languages: LanguageIds | None = None) -> int:
    """How many tokens `fill` puts before a single text."""
    return len(_around(text.template[: text.template.index("$text")], languages))


def _bare(template: Template, ids: Sequence[int], languages: LanguageIds) -> Sequence[int]:
    """Ids without what the template puts around a text, where they carry it."""
    place = template.index("$text")
    before, behind = _around(template[:place], languages), _around(template[place + 1 :], languages)
    if before and list(ids[: len(before)]) == before:
        ids = ids[len(before) :]
    if behind and list(ids[-len(behind) :]) == behind:
        ids = ids[: -len(behind)]
    return ids


def _around(elements: Template, languages: LanguageIds | None) -> list[int]:
    """The tokens of a template's elements other than texts."""
    given = languages or LanguageIds()
    named = {"$source_language": given.source, "$target_language": given.target}
    tokens = (named.get(element) if isinstance(element, str) else element for element in elements)
    return [token for token in tokens if token is not None]
