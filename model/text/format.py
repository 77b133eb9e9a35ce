"""How texts become a model's token ids and back, as its bundle says it: which files, and what stands around a text.

Torch-free and library-free: tokenizer.py reads the files. Ids of the prefix, suffix and languages are the model's own.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

TextKind = Literal["byte_bpe", "tokenizers", "sentencepiece", "bytes", "words"]
Slot = Literal["$text", "$pair", "$source_language", "$target_language"]
Template = tuple[int | Slot, ...]


class TokenizerError(Exception):
    """A tokenizer file cannot be used; the message names it."""


class NoTokenizersFile(TokenizerError):
    """A checkpoint has no tokenizer.json; its other files may do to make one."""


class TextFormat(BaseModel):
    """Files and rules of one model's text.

    kind
        byte_bpe       our own byte-level BPE, a `tokenizers` JSON that loses nothing
        tokenizers     any other `tokenizers` JSON, as the checkpoint ships it
        sentencepiece  a SentencePiece model
        bytes          UTF-8 bytes, each id its byte + id_offset (ByT5); no file
        words          a list of tokens, one a line; texts are tokens between spaces (CTranslate2 vocabularies)
    source, target: the file that reads sources, and the one of targets where it differs.
    source_vocabulary, target_vocabulary: JSON of piece to id, where a SentencePiece model's own ids are not the
        model's (Marian, M2M-100).
    id_offset: what is added to SentencePiece's own ids, or to bytes.
    added_tokens: tokens that are no pieces of the files, by id.
    special_ids: ids that stand for no text.
    template: a source as the model reads it, `$text` its own tokens; pair_template with `$pair` the second text's.
    pair_start: where in pair_template token type 1 begins (BERT); None: every token has type 0.
    languages: id of each language code; source_language and target_language, where templates name them, are filled
        from it, or from the defaults.
    target_language_place: where a target's language stands: its first token after the begin token, or the begin token.
    mask_id: the token that fill-mask fills.
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
        """Bytes have no file, which a manifest says by leaving it out."""
        return {"source": None, **given} if isinstance(given, dict) and given.get("kind") == "bytes" else given

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        for name, template, slots in (
            ("template", self.template, {"$text"}),
            ("pair_template", self.pair_template, {"$text", "$pair"}),
        ):
            for slot in slots if template is not None else ():
                if template is not None and template.count(slot) != 1:
                    raise ValueError(f"{name}={list(template)} must hold {slot} once")
        if (self.kind == "bytes") != (self.source is None):
            raise ValueError(f"source={self.source!r} does not fit kind={self.kind!r}")
        return self

    @property
    def files(self) -> tuple[str, ...]:
        """Every file that this format names."""
        named = (self.source, self.target, self.source_vocabulary, self.target_vocabulary)
        return tuple(dict.fromkeys(name for name in named if name is not None))
