"""Languages of a request: converts language codes to tokens of its source and target.

The bundle's text format defines the position of each token. Errors name the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from antiphon.domain.errors import InvalidArgument
from antiphon.domain.sampling_params import SamplingParams
from antiphon.text.format import LanguageIds, TextFormat, UnknownLanguageError, language_id
from antiphon.v1 import inference_pb2 as pb

HasOptions = pb.GenerateRequest | pb.GenerateUnaryRequest | pb.NextTokenRequest
NamesLanguages = HasOptions | pb.ScoreRequest | pb.ExplainRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLanguages:
    """Tokens of the languages of one request."""

    ids: LanguageIds = field(default_factory=LanguageIds)
    """Tokens for the source's template."""
    begin_id: int | None = None
    """First decoder input; None is the model's begin token."""
    first_id: int | None = None
    """First token of the target; None if the target need not begin with a language."""

    def target(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return a given target with its language first, which is not added twice."""
        if self.first_id is None or (ids and ids[0] == self.first_id):
            return tuple(ids)
        return (self.first_id, *ids)

    def prefix(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return a prefix with the target's language first. Without a prefix, `params` forces the language instead."""
        return self.target(ids) if ids else ()

    def params(self, params: SamplingParams, prefix_ids: Sequence[int]) -> SamplingParams:
        """Return parameters that force the language, unless there is a prefix. Raises InvalidArgument on a conflict."""
        if self.first_id is None:
            return params
        try:
            return replace(params, forced_first_id=None if prefix_ids else self.first_id)
        except InvalidArgument as error:
            allowed = f"one whose token {self.first_id} may be chosen: {error.allowed}"
            raise InvalidArgument("target_language", error.value, allowed) from None


NO_LANGUAGES = RequestLanguages()
"""For requests without languages to models without languages."""


def source_languages(text: TextFormat, code: str) -> RequestLanguages:
    """Return the languages of a source without a target. Raises InvalidArgument."""
    return RequestLanguages(ids=LanguageIds(source=_source_id(text, code)))


def named_languages(text: TextFormat, source_code: str, target_code: str) -> RequestLanguages:
    """Return the languages of codes; an empty code means the model's default. Raises InvalidArgument."""
    source, target = _source_id(text, source_code), _target_id(text, target_code)
    return RequestLanguages(
        ids=LanguageIds(source=source, target=target),
        begin_id=target if text.target_language_place == "begin" else None,
        first_id=target if text.target_language_place == "first" else None,
    )


def languages_of(text: TextFormat, message: NamesLanguages) -> RequestLanguages:
    """Return the languages that a request names, else the model's defaults. Raises InvalidArgument."""
    if not (text.languages or message.source_language or message.target_language):
        return NO_LANGUAGES
    languages = named_languages(text, message.source_language, message.target_language)
    if isinstance(message, HasOptions) and message.options.HasField("forced_first_id"):
        if message.target_language and text.target_language_place == "first":
            allowed = "empty if options.forced_first_id is set: both set the first target token"
            raise InvalidArgument("target_language", message.target_language, allowed)
        return replace(languages, first_id=None)
    return languages


def _source_id(text: TextFormat, code: str) -> int | None:
    if "$source_language" not in text.template:
        _refuse("source_language", code)
        return None
    return _id(text, "source_language", code, text.default_source_language)


def _target_id(text: TextFormat, code: str) -> int | None:
    if text.target_language_place is None and "$target_language" not in text.template:
        _refuse("target_language", code)
        return None
    return _id(text, "target_language", code, text.default_target_language)


def _refuse(field: str, code: str) -> None:
    if code:
        raise InvalidArgument(field, code, "empty: this model takes none")


def _id(text: TextFormat, field: str, code: str, default: str | None) -> int | None:
    try:
        return language_id(text, code, default)
    except UnknownLanguageError as error:
        raise InvalidArgument(field, code, error.allowed) from None
