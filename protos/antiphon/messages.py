"""The client's own types, and how they become antiphon.v1 messages and come back. Opens no connection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import grpc

from antiphon.v1 import inference_pb2

Source = str | Sequence[int]
"""Text, or token ids as Tokenize returns them."""

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How the target is chosen; None takes the model's default, which `Model.default_options` reports.

    max_new_tokens: most tokens to produce, the end token included.
    temperature: 0 always takes the likeliest token; otherwise logits are divided by it, up to 100.
    top_k: sample from the k likeliest tokens only; 0 keeps all.
    top_p: sample from the likeliest tokens whose probabilities together reach p, (0, 1].
    seed: 0 to 2**64 - 1; the same seed gives the same tokens. None lets the server pick one, which it reports.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Tokens counted for one request, end tokens included."""

    source_tokens: int
    generated_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds from arrival at the server; None where the request never got that far."""

    queued_s: float | None
    time_to_first_token_s: float | None
    total_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """New text of a stream. finish_reason is set on the last one of an output, the rest on the last of the stream."""

    text: str
    token_ids: tuple[int, ...]
    output_index: int
    finish_reason: FinishReason | None
    usage: Usage | None
    timing: Timing | None
    seed: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """One finished output."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    seed: int


class ServerError(Exception):
    """An RPC that did not end well.

    code: gRPC status. reason: stable ErrorInfo reason; field: the offending field of a bad request; retry_after_s: the
    server's advice. The last three are None where the server gave none, or where googleapis-common-protos, which
    decodes them, is not installed.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason
        self.field = field
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.code.name}: {self.message}"


def _options(options: Options | None) -> inference_pb2.GenerateOptions | None:
    if options is None:
        return None
    message = inference_pb2.GenerateOptions()
    for name, value in asdict(options).items():
        try:
            if value is not None:
                setattr(message, name, value)
        except (TypeError, ValueError):
            raise ValueError(f"options.{name} is {value!r}, which does not fit the field") from None
    return message


def stream_request(model: str, source: Source, options: Options | None) -> inference_pb2.GenerateRequest:
    """Ask for one target, streamed. Raises ValueError where a value does not fit its field."""
    if isinstance(source, str):
        return inference_pb2.GenerateRequest(model=model, text=source, options=_options(options))
    ids = inference_pb2.TokenIds(ids=source)
    return inference_pb2.GenerateRequest(model=model, token_ids=ids, options=_options(options))


def unary_request(model: str, source: Source, options: Options | None) -> inference_pb2.GenerateUnaryRequest:
    """Ask for one target, whole. Raises ValueError where a value does not fit its field."""
    if isinstance(source, str):
        return inference_pb2.GenerateUnaryRequest(model=model, text=source, options=_options(options))
    ids = inference_pb2.TokenIds(ids=source)
    return inference_pb2.GenerateUnaryRequest(model=model, token_ids=ids, options=_options(options))


def as_delta(response: inference_pb2.GenerateResponse) -> Delta:
    """Read one message of a stream."""
    return Delta(
        text=response.text_delta,
        token_ids=tuple(response.token_ids),
        output_index=response.output_index,
        finish_reason=_finish_reason(response.finish_reason) if response.finish_reason else None,
        usage=_usage(response.usage) if response.HasField("usage") else None,
        timing=_timing(response.timing) if response.HasField("timing") else None,
        seed=response.seed if response.HasField("seed") else None,
    )


def as_generation(response: inference_pb2.GenerateUnaryResponse) -> Generation:
    """Read a whole answer of one output."""
    output = response.outputs[0]
    return Generation(
        text=output.text,
        token_ids=tuple(output.token_ids),
        finish_reason=_finish_reason(output.finish_reason),
        usage=_usage(response.usage),
        timing=_timing(response.timing),
        seed=response.seed,
    )


def _finish_reason(value: inference_pb2.FinishReason.ValueType) -> FinishReason:
    return "stop" if value == inference_pb2.FINISH_REASON_STOP else "length"


def _usage(usage: inference_pb2.Usage) -> Usage:
    return Usage(source_tokens=usage.source_tokens, generated_tokens=usage.generated_tokens)


def _timing(timing: inference_pb2.Timing) -> Timing:
    return Timing(
        queued_s=timing.queued.ToNanoseconds() / 1e9 if timing.HasField("queued") else None,
        time_to_first_token_s=(
            timing.time_to_first_token.ToNanoseconds() / 1e9 if timing.HasField("time_to_first_token") else None
        ),
        total_s=timing.total.ToNanoseconds() / 1e9,
    )


def as_server_error(error: grpc.RpcError) -> ServerError:
    """Read a failed call, of grpc or grpc.aio: status, message and the details where they can be decoded."""
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError)
    refusal = ServerError(error.code(), error.details() or "no message")
    metadata = error.trailing_metadata() or ()
    details = next((value for key, value in metadata if key == "grpc-status-details-bin"), None)
    if isinstance(details, bytes):
        _read_details(refusal, details)
    return refusal


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
