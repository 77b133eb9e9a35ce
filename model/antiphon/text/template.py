"""Templates: the complete source tokens of a text or a pair, with special and language tokens around them.

Works on ids only. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.text.format import Template, TextFormat


@dataclass(frozen=True, slots=True)
class LanguageIds:
    """Ids of the language tokens of one request; None if the request names no language and there is no default."""

    source: int | None = None
    target: int | None = None


class UnknownLanguageError(ValueError):
    """A language code that the model does not have.

    allowed: the allowed values, in words.
    """

    def __init__(self, code: str, allowed: str) -> None:
        super().__init__(f"language {code!r} is not known; it must be {allowed}")
        self.allowed = allowed


def language_id(text: TextFormat, code: str, default: str | None) -> int | None:
    """Return the id of a language's token; an empty code means the default. Raises UnknownLanguageError."""
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
    """Return the source tokens with the template's tokens around them, and the token type of each.

    The slot of an unknown language adds no token. is_partly_filled: True: if ids begin with all of the template's
    tokens before the text, these are not added again; the same for the tokens after the text.
    Raises ValueError if a pair is given to a model without pair_template.
    """
    template = text.template if pair_ids is None else text.pair_template
    if template is None:
        raise ValueError("the model accepts single texts only, no pairs")
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
    """Return the number of tokens that `fill` adds before a single text."""
    return len(_around(text.template[: text.template.index("$text")], languages))


def _bare(template: Template, ids: Sequence[int], languages: LanguageIds) -> Sequence[int]:
    """Return ids without the template's tokens before and after the text, if ids contain them."""
    place = template.index("$text")
    before, after = _around(template[:place], languages), _around(template[place + 1 :], languages)
    if before and list(ids[: len(before)]) == before:
        ids = ids[len(before) :]
    if after and list(ids[-len(after) :]) == after:
        ids = ids[: -len(after)]
    return ids


def _around(elements: Template, languages: LanguageIds | None) -> list[int]:
    """Return the ids of a template's elements other than texts."""
    given = languages or LanguageIds()
    ids_by_slot = {"$source_language": given.source, "$target_language": given.target}
    tokens = (ids_by_slot.get(element) if isinstance(element, str) else element for element in elements)
    return [token for token in tokens if token is not None]
