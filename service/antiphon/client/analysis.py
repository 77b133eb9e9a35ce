"""Requests and results of calls that analyse a text: encoder heads, embeddings, tokens, the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from antiphon.client.messages import Languages, Source, Timing, Usage, as_timing, as_usage, source_fields
from antiphon.client.options import Options, options_message
from antiphon.v1 import inference_pb2

Pooling = Literal["mean", "max", "first", "model", "none"]

_POOLING: dict[Pooling, inference_pb2.Pooling.ValueType] = {
    "mean": inference_pb2.POOLING_MEAN,
    "max": inference_pb2.POOLING_MAX,
    "first": inference_pb2.POOLING_FIRST,
    "model": inference_pb2.POOLING_MODEL,
    "none": inference_pb2.POOLING_NONE,
}

StageName = Literal["model", "logits_processors", "temperature", "top_k", "top_p", "min_p", "typical_p", "unknown"]
"""Step of sampling; "unknown" is one of a newer server that this client does not know."""

_STAGES: dict[inference_pb2.SamplingStage.ValueType, StageName] = {
    inference_pb2.SAMPLING_STAGE_MODEL: "model",
    inference_pb2.SAMPLING_STAGE_LOGITS_PROCESSORS: "logits_processors",
    inference_pb2.SAMPLING_STAGE_TEMPERATURE: "temperature",
    inference_pb2.SAMPLING_STAGE_TOP_K: "top_k",
    inference_pb2.SAMPLING_STAGE_TOP_P: "top_p",
    inference_pb2.SAMPLING_STAGE_MIN_P: "min_p",
    inference_pb2.SAMPLING_STAGE_TYPICAL_P: "typical_p",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenization:
    """Token ids of a text, without special tokens, and the text in the form that the model reads."""

    token_ids: tuple[int, ...]
    normalized_text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Detokenization:
    """Text of token ids, and the piece of each: its text with leading space, or a special token's name."""

    text: str
    pieces: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Distribution of the next token after one step of sampling.

    logprobs: natural log-probability of each of NextToken.token_ids; minus infinity for a dropped token.
    num_kept: number of tokens of the vocabulary that are not dropped. entropy: in nats.
    """

    name: StageName
    logprobs: tuple[float, ...]
    num_kept: int
    entropy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NextToken:
    """Distribution of the next token after every step of its sampling.

    token_ids: the most likely tokens of the model, then those of the last stage that are not among them.
    pieces: of token_ids. stages: in the order of the computation, those without effect included.
    """

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    stages: tuple[Stage, ...]


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


def next_token_request(
    model: str,
    source: Source,
    options: Options | None,
    languages: Languages,
    *,
    generated_ids: Sequence[int],
    num_tokens: int,
) -> inference_pb2.NextTokenRequest:
    """Build a request for the next token. Raises ValueError if a value is out of its field's range."""
    return inference_pb2.NextTokenRequest(
        model=model,
        options=options_message(options),
        generated_ids=inference_pb2.TokenIds(ids=generated_ids),
        num_tokens=num_tokens,
        source_language=languages.source,
        target_language=languages.target,
        **source_fields(source),
    )


def as_embedding(response: inference_pb2.EmbedResponse) -> Embedding:
    """Read an embedded source."""
    return Embedding(vector=tuple(response.embedding), **_usage_and_timing(response))


def as_classification(response: inference_pb2.ClassifyResponse) -> Classification:
    """Read a classified text."""
    return Classification(
        labels=tuple(LabelScore(entry.label, entry.score) for entry in response.labels), **_usage_and_timing(response)
    )


def as_tagging(response: inference_pb2.TagResponse) -> Tagging:
    """Read a labelled text."""
    return Tagging(
        tokens=tuple(
            TaggedToken(token.token_id, token.start, token.end, token.label, token.score) for token in response.tokens
        ),
        spans=tuple(TaggedSpan(span.start, span.end, span.label, span.score) for span in response.spans),
        **_usage_and_timing(response),
    )


def as_filled_masks(response: inference_pb2.FillMaskResponse) -> FilledMasks:
    """Read filled places."""
    places = tuple(
        MaskedPlace(
            place.position, tuple(Filling(filling.token_id, filling.text, filling.score) for filling in place.fillings)
        )
        for place in response.places
    )
    return FilledMasks(places=places, **_usage_and_timing(response))


def _usage_and_timing(response: Any) -> dict[str, Any]:
    return {"usage": as_usage(response.usage), "timing": as_timing(response.timing)}


def as_next_token(response: inference_pb2.NextTokenResponse) -> NextToken:
    """Read the distribution of a next token."""
    return NextToken(
        token_ids=tuple(response.token_ids),
        pieces=tuple(response.pieces),
        stages=tuple(
            Stage(
                name=_STAGES.get(stage.stage, "unknown"),
                logprobs=tuple(stage.logprobs),
                num_kept=stage.num_kept,
                entropy=stage.entropy,
            )
            for stage in response.stages
        ),
    )


def as_tokenization(response: inference_pb2.TokenizeResponse) -> Tokenization:
    """Read the tokens of a text."""
    return Tokenization(token_ids=tuple(response.token_ids), normalized_text=response.normalized_text)


def as_detokenization(response: inference_pb2.DetokenizeResponse) -> Detokenization:
    """Read the text of tokens; an older server sends no pieces."""
    return Detokenization(text=response.text, pieces=tuple(response.pieces))
