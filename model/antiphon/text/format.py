"""Text format of a bundle: tokenizer files, special ids, languages, and templates that are filled with ids.

tokenizer.py reads the files; this module needs no tokenizer library and no torch. All ids are ids of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

TextKind = Literal["byte_bpe", "tokenizers", "sentencepiece", "bytes", "words"]
Slot = Literal["$text", "$pair", "$source_language", "$target_language"]
Template = tuple[int | Slot, ...]


class TextFormat(BaseModel):
    """Tokenizer files and rules of one model.

    kind
        byte_bpe       byte-level BPE trained by this project, a `tokenizers` JSON (subwords.py)
        tokenizers     any other `tokenizers` JSON, as in the checkpoint
        sentencepiece  a SentencePiece model
        bytes          UTF-8 bytes, id = byte + id_offset (ByT5); no file
        words          a list of tokens, one a line; texts are tokens between spaces (CTranslate2 vocabularies)
    source, target: tokenizer file of sources, and of targets if it is a different file.
    source_vocabulary, target_vocabulary: JSON file from piece to id, for models whose ids differ from the ids of the
        SentencePiece model (Marian, M2M-100).
    id_offset: number added to the ids of the SentencePiece model, or to bytes.
    added_tokens: id of each token that is not in the files.
    special_ids: ids of tokens without text.
    template: token ids of a complete source; `$text` represents the tokens of the text.
    pair_template: the same for a pair; `$pair` represents the tokens of the second text.
    pair_start: index in pair_template of the first element with token type 1 (BERT); None: all tokens have type 0.
    languages: id of each language code. `$source_language` and `$target_language` in templates represent the id of the
    requested language, or of default_source_language and default_target_language.
    target_language_place: position of the target's language token: "first" after the begin token, or "begin" instead
        of the begin token.
    mask_id: id of the mask token.
    shortlist: file of the target tokens that each source token can become (shortlist.py).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: TextKind = "byte_bpe"
    source: str | None = "tokenizer.json"
    target: str | None = None
    source_vocabulary: str | None = None
    target_vocabulary: str | None = None
    id_offset: int = 0
    added_tokens: dict[str, int] = Field(default_factory=dict)
    special_ids: tuple[int, ...] = ()
    template: Template
    pair_template: Template | None = None
    pair_start: int | None = None
    languages: dict[str, int] = Field(default_factory=dict)
    default_source_language: str | None = None
    default_target_language: str | None = None
    target_language_place: Literal["first", "begin"] | None = None
    mask_id: int | None = None
    shortlist: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_file(cls, fields: Any) -> Any:
        """Set source=None for kind="bytes", which has no file; a manifest omits the field."""
        return {"source": None, **fields} if isinstance(fields, dict) and fields.get("kind") == "bytes" else fields

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        for name, template, slots in (
            ("template", self.template, {"$text"}),
            ("pair_template", self.pair_template, {"$text", "$pair"}),
        ):
            for slot in slots if template is not None else ():
                if template is not None and template.count(slot) != 1:
                    raise ValueError(f"{name}={list(template)} must contain {slot} exactly once")
        if (self.kind == "bytes") != (self.source is None):
            raise ValueError(f"source={self.source!r} does not fit kind={self.kind!r}")
        return self

    @property
    def files(self) -> tuple[str, ...]:
        """Names of all files of this format, without duplicates."""
        return self.tokenizer_files if self.shortlist is None else (*self.tokenizer_files, self.shortlist)

    @property
    def tokenizer_files(self) -> tuple[str, ...]:
        """Names of the files that the tokenizer reads, without duplicates."""
        named = (self.source, self.target, self.source_vocabulary, self.target_vocabulary)
        return tuple(dict.fromkeys(name for name in named if name is not None))


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
    languages = languages or LanguageIds()
    ids_by_slot = {"$source_language": languages.source, "$target_language": languages.target}
    tokens = (ids_by_slot.get(element) if isinstance(element, str) else element for element in elements)
    return [token for token in tokens if token is not None]
