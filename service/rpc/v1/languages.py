"""The languages of a request: from codes to tokens, and to what they change of its target.

Where a code goes is the bundle's to say, in its text format; what is refused is told with the field's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from antiphon.model.text.format import TextFormat
from antiphon.model.text.template import LanguageIds, UnknownLanguageError, language_id
from antiphon.service.domain.errors import InvalidArgument
from antiphon.service.domain.request import SamplingParams
from antiphon.v1 import inference_pb2 as pb

NamesLanguages = pb.GenerateRequest | pb.GenerateUnaryRequest | pb.ScoreRequest | pb.ExplainRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLanguages:
    """What the languages of one request come to.

    ids: for the source's template. begin_id: first decoder input; None: the model's own.
    first_id: first token of the target; None: any.
    """

    ids: LanguageIds = field(default_factory=LanguageIds)
    begin_id: int | None = None
    first_id: int | None = None

    def target(self, ids: Sequence[int]) -> tuple[int, ...]:
        """A target that is given, with its language first, which it may hold already."""
        if self.first_id is None or (ids and ids[0] == self.first_id):
            return tuple(ids)
        return (self.first_id, *ids)

    def prefix(self, ids: Sequence[int]) -> tuple[int, ...]:
        """A prefix, with the target's language first; where there is none the language is forced instead."""
        return self.target(ids) if ids else ()

    def params(self, params: SamplingParams, prefix_ids: Sequence[int]) -> SamplingParams:
        """Parameters that force the language, or leave it to the prefix. Raises InvalidArgument where they cannot."""
        if self.first_id is None:
            return params
        try:
            return replace(params, forced_first_id=None if prefix_ids else self.first_id)
        except InvalidArgument as error:
            allowed = f"one whose token {self.first_id} may be chosen: {error.allowed}"
            raise InvalidArgument("target_language", error.value, allowed) from None


NO_LANGUAGES = RequestLanguages()
"""Of a model without languages, where none is named."""


def source_languages(text: TextFormat, code: str) -> RequestLanguages:
    """Languages of a source that has no target. Raises InvalidArgument."""
    return RequestLanguages(ids=LanguageIds(source=_source_id(text, code)))


def named_languages(text: TextFormat, source_code: str, target_code: str) -> RequestLanguages:
    """What codes come to, an empty one taking the model's default. Raises InvalidArgument."""
    source, target = _source_id(text, source_code), _target_id(text, target_code)
    return RequestLanguages(
        ids=LanguageIds(source=source, target=target),
        begin_id=target if text.target_language_place == "begin" else None,
        first_id=target if text.target_language_place == "first" else None,
    )


def languages_of(text: TextFormat, message: NamesLanguages) -> RequestLanguages:
    """Languages that a request names, and the model's defaults where it is silent. Raises InvalidArgument."""
    if not (text.languages or message.source_language or message.target_language):
        return NO_LANGUAGES
    languages = named_languages(text, message.source_language, message.target_language)
    if isinstance(message, pb.GenerateRequest | pb.GenerateUnaryRequest) and message.options.HasField(
        "forced_first_id"
    ):
        if message.target_language and text.target_language_place == "first":
            allowed = "empty where options.forced_first_id is set: they say the same thing"
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
