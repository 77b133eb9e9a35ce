"""Text format of a bundle: tokenizer files, templates around a text, languages and special ids.

tokenizer.py reads the files; this module needs no tokenizer library and no torch. All ids are ids of the model.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

TextKind = Literal["byte_bpe", "tokenizers", "sentencepiece", "bytes", "words"]
Slot = Literal["$text", "$pair", "$source_language", "$target_language"]
Template = tuple[int | Slot, ...]


class TextFormat(BaseModel):
    """Tokenizer files and rules of one model.

    kind
        byte_bpe       byte-level BPE trained by this project, a `tokenizers` JSON (byte_bpe.py)
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

    @model_validator(mode="before")
    @classmethod
    def _without_file(cls, given: Any) -> Any:
        """Set source=None for kind="bytes", which has no file; a manifest omits the field."""
        return {"source": None, **given} if isinstance(given, dict) and given.get("kind") == "bytes" else given

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
        named = (self.source, self.target, self.source_vocabulary, self.target_vocabulary)
        return tuple(dict.fromkeys(name for name in named if name is not None))
