"""Tokens of texts and distributions of the next token: requests and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from antiphon.client.messages import Languages, Source, source_fields
from antiphon.client.options import Options, options_message
from antiphon.v1 import inference_pb2

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
