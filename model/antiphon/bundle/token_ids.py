"""Check that the token ids in a manifest are within the model's vocabularies. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from antiphon.text.format import TextFormat

if TYPE_CHECKING:
    from antiphon.bundle.manifest import GenerationDefaults, Manifest

_LANGUAGE_SLOTS = {"$source_language", "$target_language"}
_Ids = tuple[str, list[int], int]
"""Name of a field, its ids, and the size of their vocabulary."""


def check_ids(manifest: Manifest) -> None:
    """Raise ValueError naming field, value and range if an id is outside its vocabulary.

    Also raise it for an unknown default language and for a pair_start outside the pair template.
    """
    text, model = manifest.text, manifest.model
    target, source = model.vocab_size, model.resolved_source_vocab_size
    for field, ids, size in (*_of_text(text, source, target), *_of_generation(manifest.generation, target)):
        for token_id in ids:
            if not 0 <= token_id < size:
                raise ValueError(f"{field} is {token_id}; it must be from 0 to {size - 1}, an id of the vocabulary")
    _check_names(text)


def _of_text(text: TextFormat, source: int, target: int) -> Iterator[_Ids]:
    yield "text.template", _numbers(text.template), source
    yield "text.pair_template", _numbers(text.pair_template or ()), source
    yield "text.special_ids", list(text.special_ids), max(source, target)
    yield "text.mask_id", [] if text.mask_id is None else [text.mask_id], source
    yield from _named("text.added_tokens", text.added_tokens, max(source, target))
    # A language token is part of a source, of a target, or of both.
    uses = [source] if _LANGUAGE_SLOTS.intersection(map(str, text.template)) else []
    uses += [target] if text.target_language_place is not None else []
    yield from _named("text.languages", text.languages, min(uses, default=max(source, target)))


def _of_generation(generation: GenerationDefaults, target: int) -> Iterator[_Ids]:
    forced = generation.forced_first_id
    yield "generation.forced_first_id", [] if forced is None else [forced], target
    yield "generation.suppressed_ids", list(generation.suppressed_ids), target
    yield "generation.stop_ids", list(generation.stop_ids), target
    yield "generation.logit_bias", [token_id for token_id, _ in generation.logit_bias], target


def _numbers(template: tuple[int | str, ...]) -> list[int]:
    return [element for element in template if isinstance(element, int)]


def _named(field: str, ids: Mapping[str, int], size: int) -> Iterator[_Ids]:
    for name, token_id in ids.items():
        yield f"{field}.{name}", [token_id], size


def _check_names(text: TextFormat) -> None:
    """Raise ValueError for an unknown default language, or a pair_start outside the pair template."""
    for side in ("source", "target"):
        code = getattr(text, f"default_{side}_language")
        if code is not None and code not in text.languages:
            raise ValueError(f"text.default_{side}_language is {code!r}; it must be one of text.languages")
    longest = len(text.pair_template or ())
    if text.pair_start is not None and not 0 <= text.pair_start <= longest:
        raise ValueError(f"text.pair_start is {text.pair_start}; it must be from 0 to {longest}")
