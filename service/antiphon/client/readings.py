"""Requests to encoder heads and their results: labels, tags, filled masks, embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from antiphon.client.messages import Languages, Source, Timing, Usage, as_timing, as_usage, source_fields
from antiphon.v1 import inference_pb2

Pooling = Literal["mean", "max", "first", "model", "none"]

_POOLING: dict[Pooling, inference_pb2.Pooling.ValueType] = {
    "mean": inference_pb2.POOLING_MEAN,
    "max": inference_pb2.POOLING_MAX,
    "first": inference_pb2.POOLING_FIRST,
    "model": inference_pb2.POOLING_MODEL,
    "none": inference_pb2.POOLING_NONE,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedding:
    """Vector of a source; with pooling "none" the concatenated states of all tokens."""

    vector: tuple[float, ...]
    usage: Usage
    timing: Timing

    @property
    def per_token(self) -> tuple[tuple[float, ...], ...]:
        """Return the state of each token, special tokens included; only for pooling "none"."""
        width = len(self.vector) // self.usage.source_tokens
        return tuple(self.vector[start : start + width] for start in range(0, len(self.vector), width))


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label and its probability; for a regression model, its value."""

    label: str
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification:
    """Labels of a text or a pair, best first."""

    labels: tuple[LabelScore, ...]
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class TaggedToken:
    """A token at code points [start, end) of the text, its most likely label and the label's probability."""

    token_id: int
    start: int
    end: int
    label: str
    score: float


@dataclass(frozen=True, slots=True)
class TaggedSpan:
    """Adjacent words of one label at code points [start, end) of the text, and the mean of their probabilities."""

    start: int
    end: int
    label: str
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagging:
    """A labelled text: every token except special ones, and the spans of labels other than O."""

    tokens: tuple[TaggedToken, ...]
    spans: tuple[TaggedSpan, ...]
    usage: Usage
    timing: Timing


@dataclass(frozen=True, slots=True)
class Filling:
    """A token proposed for a masked place: its id, text and probability."""

    token_id: int
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class MaskedPlace:
    """A masked place: its position among the source's tokens, special ones included, and its most likely tokens."""

    position: int
    fillings: tuple[Filling, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FilledMasks:
    """Every masked place of a text, in order."""

    places: tuple[MaskedPlace, ...]
    usage: Usage
    timing: Timing


def embed_request(
    model: str, source: Source, pooling: Pooling | None, languages: Languages, *, pair: str | None, normalize: bool
) -> inference_pb2.EmbedRequest:
    """Build a request for encoder states. Raises ValueError for an unknown pooling."""
    if pooling is not None and pooling not in _POOLING:
        raise ValueError(f"pooling is {pooling!r}; it must be one of {', '.join(_POOLING)}")
    return inference_pb2.EmbedRequest(
        model=model,
        pooling=inference_pb2.POOLING_UNSPECIFIED if pooling is None else _POOLING[pooling],
        normalize=normalize,
        text_pair=pair,
        source_language=languages.source,
        **source_fields(source),
    )


def classify_request(
    model: str, source: Source, *, pair: str | None, top_k: int, next_sentence: bool
) -> inference_pb2.ClassifyRequest:
    """Build a request for labels. Raises ValueError if a value is out of its field's range."""
    task = inference_pb2.TASK_NEXT_SENTENCE if next_sentence else inference_pb2.TASK_CLASSIFY
    return inference_pb2.ClassifyRequest(model=model, task=task, top_k=top_k, text_pair=pair, **source_fields(source))


def fill_mask_request(model: str, source: Source, top_k: int) -> inference_pb2.FillMaskRequest:
    """Build a request for tokens of masked places. Raises ValueError if a value is out of its field's range."""
    return inference_pb2.FillMaskRequest(model=model, top_k=top_k, **source_fields(source))


def as_embedding(response: inference_pb2.EmbedResponse) -> Embedding:
    """Read an embedded source."""
    return Embedding(vector=tuple(response.embedding), **_about(response))


def as_classification(response: inference_pb2.ClassifyResponse) -> Classification:
    """Read a classified text."""
    return Classification(
        labels=tuple(LabelScore(entry.label, entry.score) for entry in response.labels), **_about(response)
    )


def as_tagging(response: inference_pb2.TagResponse) -> Tagging:
    """Read a labelled text."""
    return Tagging(
        tokens=tuple(TaggedToken(one.token_id, one.start, one.end, one.label, one.score) for one in response.tokens),
        spans=tuple(TaggedSpan(one.start, one.end, one.label, one.score) for one in response.spans),
        **_about(response),
    )


def as_filled_masks(response: inference_pb2.FillMaskResponse) -> FilledMasks:
    """Read filled places."""
    places = tuple(
        MaskedPlace(place.position, tuple(Filling(one.token_id, one.text, one.score) for one in place.fillings))
        for place in response.places
    )
    return FilledMasks(places=places, **_about(response))


def _about(response: Any) -> dict[str, Any]:
    return {"usage": as_usage(response.usage), "timing": as_timing(response.timing)}
