"""What a client gets of an encoder alone, and how it is asked: labels, tags, filled masks, embeddings."""

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
    """A source's encoder states, pooled into one vector; with pooling "none" those of every token in a row."""

    vector: tuple[float, ...]
    usage: Usage
    timing: Timing

    @property
    def per_token(self) -> tuple[tuple[float, ...], ...]:
        """With pooling "none": the state of each token, special tokens included."""
        width = len(self.vector) // self.usage.source_tokens
        return tuple(self.vector[start : start + width] for start in range(0, len(self.vector), width))


@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label and its probability; of a model that regresses, the value itself."""

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
    """A token at code points [start, end) of the text, its likeliest label and that label's probability."""

    token_id: int
    start: int
    end: int
    label: str
    score: float


@dataclass(frozen=True, slots=True)
class TaggedSpan:
    """Neighbouring words of one label at code points [start, end) of the text; the mean of their probabilities."""

    start: int
    end: int
    label: str
    score: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tagging:
    """A labelled text: every token, special ones left out, and the spans of labels other than O."""

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
    """A masked place: which of the source's tokens it is, special ones counted, and proposals, likeliest first."""

    position: int
    fillings: tuple[Filling, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FilledMasks:
    """Every masked place of a text, in order."""

    places: tuple[MaskedPlace, ...]
    usage: Usage
    timing: Timing


def embed_request(
    model: str, source: Source, pooling: Pooling, languages: Languages, *, pair: str | None, normalize: bool
) -> inference_pb2.EmbedRequest:
    """Ask for encoder states. Raises ValueError for a pooling that there is not."""
    if pooling not in _POOLING:
        raise ValueError(f"pooling is {pooling!r}; it must be one of {', '.join(_POOLING)}")
    return inference_pb2.EmbedRequest(
        model=model,
        pooling=_POOLING[pooling],
        normalize=normalize,
        text_pair=pair,
        source_language=languages.source,
        **source_fields(source),
    )


def classify_request(
    model: str, source: Source, *, pair: str | None, top_k: int, next_sentence: bool
) -> inference_pb2.ClassifyRequest:
    """Ask for labels. Raises ValueError where a value does not fit its field."""
    task = inference_pb2.TASK_NEXT_SENTENCE if next_sentence else inference_pb2.TASK_CLASSIFY
    return inference_pb2.ClassifyRequest(model=model, task=task, top_k=top_k, text_pair=pair, **source_fields(source))


def fill_mask_request(model: str, source: Source, top_k: int) -> inference_pb2.FillMaskRequest:
    """Ask for tokens in masked places. Raises ValueError where a value does not fit its field."""
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
