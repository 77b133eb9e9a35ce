"""Types of the client, and their conversion to and from antiphon.v1 messages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import grpc

from antiphon.client.options import Options, options_message
from antiphon.v1 import inference_pb2

_REQUEST_ID_KEY = "x-request-id"

Source = str | Sequence[int]
"""Text, or token ids as Tokenize returns them."""

FinishReason = Literal["stop", "length", "stop_sequence", "time_limit", "exhausted", "unknown"]
"""Reason for the end of an output; "unknown" is a reason of a newer server that this client does not know."""

_FINISH_REASONS: dict[inference_pb2.FinishReason.ValueType, FinishReason] = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
    inference_pb2.FINISH_REASON_STOP_SEQUENCE: "stop_sequence",
    inference_pb2.FINISH_REASON_TIME_LIMIT: "time_limit",
    inference_pb2.FINISH_REASON_EXHAUSTED: "exhausted",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Languages:
    """Languages of a multilingual model, as GetModel lists them; empty takes the model's default."""

    source: str = ""
    target: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens counted for one request, end tokens included, and the most cache blocks that it held at one time.

    candidate_tokens: number of tokens that could be chosen, with use_shortlist; 0 is the whole vocabulary.
    """

    source_tokens: int
    generated_tokens: int
    cache_blocks: int
    candidate_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds from arrival at the server; None for a stage that the request did not reach."""

    queued_s: float | None
    time_to_first_token_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probability of a token under the model, and of the most likely alternatives, best first."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Beam:
    """A beam after one step of a search.

    parent: index of the beam that it continues, among the live beams of the step before; 0 at the first step.
    total_logprob: sum of the log-probabilities of all its tokens, after penalties.
    score: of a finished hypothesis; None while it lives.
    """

    parent: int
    token_id: int
    total_logprob: float
    score: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamStep:
    """One step of a beam search: its live beams, best first, and the hypotheses that ended, in the order of finding."""

    live: tuple[Beam, ...]
    finished: tuple[Beam, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """New text of one output of a stream.

    logprobs: of token_ids, and of the token that ended the output; empty unless requested.
    finish_reason, score: set in the last delta of an output.
    usage, timing, seed, beam_steps: set in the last delta of the stream; beam_steps only if requested.
    """

    text: str
    token_ids: tuple[int, ...]
    output_index: int
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    score: float | None
    usage: Usage | None
    timing: Timing | None
    seed: int | None
    beam_steps: tuple[BeamStep, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One finished output. usage, timing, seed and beam_steps are those of its request.

    logprobs: of token_ids, and of the token that ended the output; empty unless requested.
    score: score of a beam hypothesis, or the sum of log-probabilities if they were requested.
    beam_steps: steps of the beam search, in order; empty unless requested.
    """

    text: str
    token_ids: tuple[int, ...]
    output_index: int
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    score: float | None
    usage: Usage
    timing: Timing
    seed: int
    beam_steps: tuple[BeamStep, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Log-probability of a given target under the model: of each token, the end token last, and their sum."""

    logprobs: tuple[TokenLogprob, ...]
    score: float
    usage: Usage
    timing: Timing


class ServerError(Exception):
    """An RPC failed.

    code: gRPC status. retry_after_s: the server's advice for a retry, if it gave one. request_id: id of the call in the
    server's log. reason: stable ErrorInfo reason. field: the invalid field of a bad request. reason and field are None
    if googleapis-common-protos, which decodes them, is not installed.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.field = field
        self.retry_after_s = retry_after_s
        self.request_id = request_id

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


def stream_request(
    model: str, source: Source, options: Options | None, languages: Languages, *, report_beam_steps: bool = False
) -> inference_pb2.GenerateRequest:
    """Build a request for streamed targets. Raises ValueError if a value is out of its field's range."""
    return inference_pb2.GenerateRequest(
        report_beam_steps=report_beam_steps, **_generation_fields(model, source, options, languages)
    )


def unary_request(
    model: str, source: Source, options: Options | None, languages: Languages, *, report_beam_steps: bool = False
) -> inference_pb2.GenerateUnaryRequest:
    """Build a request for complete targets. Raises ValueError if a value is out of its field's range."""
    return inference_pb2.GenerateUnaryRequest(
        report_beam_steps=report_beam_steps, **_generation_fields(model, source, options, languages)
    )


def _generation_fields(model: str, source: Source, options: Options | None, languages: Languages) -> dict[str, Any]:
    return {
        "model": model,
        "options": options_message(options),
        **source_fields(source),
        **_language_fields(languages),
    }


def score_request(
    model: str, source: Source, target: Source, num_alternatives: int, languages: Languages
) -> inference_pb2.ScoreRequest:
    """Build a request for the log-probabilities of a target."""
    return inference_pb2.ScoreRequest(
        model=model,
        num_alternatives=num_alternatives,
        **source_fields(source),
        **_target(target),
        **_language_fields(languages),
    )


def explain_request(
    model: str, source: Source, target: Source | None, languages: Languages, *, pair: str | None
) -> inference_pb2.ExplainRequest:
    """Build a request for attention maps. target, pair: None leaves the field unset."""
    target_fields = {} if target is None else _target(target)
    return inference_pb2.ExplainRequest(
        model=model, text_pair=pair, **source_fields(source), **target_fields, **_language_fields(languages)
    )


def source_fields(source: Source) -> dict[str, Any]:
    """Return the fields of a source, which are the same in every request."""
    return {"text": source} if isinstance(source, str) else {"token_ids": inference_pb2.TokenIds(ids=source)}


def _target(target: Source) -> dict[str, Any]:
    if isinstance(target, str):
        return {"target_text": target}
    return {"target_token_ids": inference_pb2.TokenIds(ids=target)}


def _language_fields(languages: Languages) -> dict[str, Any]:
    return {"source_language": languages.source, "target_language": languages.target}


def as_delta(response: inference_pb2.GenerateResponse) -> Delta:
    """Read one message of a stream."""
    return Delta(
        text=response.text_delta,
        token_ids=tuple(response.token_ids),
        output_index=response.output_index,
        logprobs=_logprobs(response.logprobs),
        finish_reason=_finish_reason(response.finish_reason) if response.finish_reason else None,
        score=response.score if response.HasField("score") else None,
        usage=as_usage(response.usage) if response.HasField("usage") else None,
        beam_steps=_beam_steps(response.beam_steps),
        timing=as_timing(response.timing) if response.HasField("timing") else None,
        seed=response.seed if response.HasField("seed") else None,
    )


def as_generations(response: inference_pb2.GenerateUnaryResponse) -> list[Generation]:
    """Read every output of a complete answer."""
    usage, timing = as_usage(response.usage), as_timing(response.timing)
    steps = _beam_steps(response.beam_steps)
    return [
        Generation(
            text=output.text,
            token_ids=tuple(output.token_ids),
            output_index=output.output_index,
            logprobs=_logprobs(output.logprobs),
            finish_reason=_finish_reason(output.finish_reason),
            score=output.score if output.HasField("score") else None,
            usage=usage,
            timing=timing,
            seed=response.seed,
            beam_steps=steps,
        )
        for output in response.outputs
    ]


def _finish_reason(value: inference_pb2.FinishReason.ValueType) -> FinishReason:
    return _FINISH_REASONS.get(value, "unknown")


def as_judgement(response: inference_pb2.ScoreResponse) -> Judgement:
    """Read a scored target."""
    return Judgement(
        logprobs=_logprobs(response.logprobs),
        score=response.score,
        usage=as_usage(response.usage),
        timing=as_timing(response.timing),
    )


def _logprobs(entries: Iterable[inference_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            entry.token_id, entry.logprob, tuple((token.token_id, token.logprob) for token in entry.alternatives)
        )
        for entry in entries
    )


def _beam_steps(steps: Iterable[inference_pb2.BeamStep]) -> tuple[BeamStep, ...]:
    return tuple(BeamStep(live=_beams(step.live), finished=_beams(step.finished)) for step in steps)


def _beams(beams: Iterable[inference_pb2.Beam]) -> tuple[Beam, ...]:
    return tuple(
        Beam(
            parent=beam.parent,
            token_id=beam.token_id,
            total_logprob=beam.total_logprob,
            score=beam.score if beam.HasField("score") else None,
        )
        for beam in beams
    )


def as_usage(usage: inference_pb2.Usage) -> Usage:
    """Read the token and block counts."""
    return Usage(
        source_tokens=usage.source_tokens,
        generated_tokens=usage.generated_tokens,
        cache_blocks=usage.cache_blocks,
        candidate_tokens=usage.candidate_tokens,
    )


def as_timing(timing: inference_pb2.Timing) -> Timing:
    """Read the times of a request."""
    return Timing(
        queued_s=timing.queued.ToNanoseconds() / 1e9 if timing.HasField("queued") else None,
        time_to_first_token_s=(
            timing.time_to_first_token.ToNanoseconds() / 1e9 if timing.HasField("time_to_first_token") else None
        ),
        total_s=timing.total.ToNanoseconds() / 1e9,
    )


@contextlib.contextmanager
def server_errors() -> Iterator[None]:
    """Raise ServerError in place of the gRPC error of a failed call."""
    try:
        yield
    except grpc.RpcError as error:
        raise as_server_error(error) from None


def as_server_error(error: grpc.RpcError) -> ServerError:
    """Read a failed call of grpc or grpc.aio: status, message, and the details if they can be decoded."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    metadata: dict[str, str | bytes] = dict(error.trailing_metadata() or ())
    headers: dict[str, str | bytes] = dict(
        error.initial_metadata() or ()
    )  # an interrupted stream has no trailing metadata
    refusal = ServerError(
        error.code(),
        error.details() or "no message",
        retry_after_s=_pushback_s(metadata.get("grpc-retry-pushback-ms")),
        request_id=_text(metadata.get(_REQUEST_ID_KEY, headers.get(_REQUEST_ID_KEY))),
    )
    if isinstance(details := metadata.get("grpc-status-details-bin"), bytes):
        _read_details(refusal, details)
    return refusal


def _pushback_s(value: str | bytes | None) -> float | None:
    """Return the seconds of gRFC A6's pushback; None if there is none, or if it forbids a retry."""
    text = _text(value)
    return int(text) / 1000 if text is not None and text.isdecimal() else None


def _text(value: str | bytes | None) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _read_details(refusal: ServerError, details: bytes) -> None:
    try:
        from google.rpc import error_details_pb2, status_pb2
    except ImportError:  # googleapis-common-protos is not part of the base install
        return
    for packed in status_pb2.Status.FromString(details).details:
        if packed.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            refusal.reason = error_details_pb2.ErrorInfo.FromString(packed.value).reason
        elif packed.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            violations = error_details_pb2.BadRequest.FromString(packed.value).field_violations
            refusal.field = violations[0].field if violations else None
        elif packed.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            delay = error_details_pb2.RetryInfo.FromString(packed.value).retry_delay
            refusal.retry_after_s = delay.ToNanoseconds() / 1e9
