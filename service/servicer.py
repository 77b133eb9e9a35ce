"""antiphon.v1.InferenceService: protobuf in, domain objects out, and back. Decides nothing.

Limits are the engine's to check, but for sources that are far too long to be worth tokenising; here a message becomes
a Request, events become messages, and a client that hangs up becomes a cancellation.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from dataclasses import dataclass
from typing import Any, Protocol, cast

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from antiphon.model.tokenizer import Tokenizer
from antiphon.service.engine import Engine
from antiphon.service.errors import EngineFault, InvalidArgument, ModelNotFound
from antiphon.service.request import FinishReason, Request, SamplingParams, Timing, TokenEvent
from antiphon.service.stream import OutputStream
from antiphon.v1 import inference_pb2 as pb

# Above this many characters or ids the tokenizer takes over a millisecond, too long for the event loop.
MAX_INLINE_LEN = 2000

_Context = grpc.aio.ServicerContext[Any, Any]
_GenerateRequest = pb.GenerateRequest | pb.GenerateUnaryRequest

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


class _NamesModel(Protocol):
    """Any request: each names a model."""

    @property
    def model(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What the servicer tells of the model, and the tokenizer it reads and writes with."""

    description: pb.Model
    tokenizer: Tokenizer


class InferenceServicer:
    """The RPC methods of one model and its engine. Methods raise AntiphonError; `handlers.py` tells the client."""

    def __init__(self, model: ServedModel, engine: Engine, *, max_messages_per_s: float) -> None:
        self._model = model
        self._tokenizer = model.tokenizer
        self._engine = engine
        self._max_messages_per_s = max_messages_per_s
        self._num_streams = 0
        self._ids = itertools.count()

    async def generate(self, message: pb.GenerateRequest, context: _Context) -> None:
        """Stream one target in deltas."""
        request = await self._request(message, context)
        decoder = self._tokenizer.stream()
        stream = self._submit(message, request)
        self._num_streams += 1
        try:
            async for event in stream:
                text = decoder.push(event.token_ids)
                if event.finish_reason is not None:
                    await context.write(_last_response(text + decoder.finish(), event, request))
                elif text or event.token_ids:
                    await context.write(pb.GenerateResponse(text_delta=text, token_ids=event.token_ids))
        finally:
            self._num_streams -= 1
            self._engine.cancel(request.request_id)

    async def generate_unary(self, message: pb.GenerateUnaryRequest, context: _Context) -> pb.GenerateUnaryResponse:
        """Return one target whole."""
        request = await self._request(message, context)
        stream = self._submit(message, request)
        try:
            event = await stream.collect()
        finally:
            self._engine.cancel(request.request_id)
        output = pb.Output(
            text=self._tokenizer.decode(event.token_ids),
            token_ids=event.token_ids,
            finish_reason=_finish_reason(event),
        )
        return pb.GenerateUnaryResponse(
            outputs=[output], usage=_usage(event, request), timing=_timing(event.timing), seed=request.params.seed
        )

    async def tokenize(self, message: pb.TokenizeRequest, context: _Context) -> pb.TokenizeResponse:
        """Return a text's token ids and its normalised form."""
        self._check_model(message)
        token_ids = await self._encode(message.text)
        return pb.TokenizeResponse(token_ids=token_ids, normalized_text=self._tokenizer.decode(token_ids))

    async def detokenize(self, message: pb.DetokenizeRequest, context: _Context) -> pb.DetokenizeResponse:
        """Return the text of token ids."""
        self._check_model(message)
        highest = self._tokenizer.vocab_size - 1
        if (found := max(message.token_ids, default=0)) > highest:
            raise InvalidArgument("token_ids", found, f"of token ids from 0 to {highest}")
        if len(message.token_ids) <= MAX_INLINE_LEN:
            return pb.DetokenizeResponse(text=self._tokenizer.decode(message.token_ids))
        return pb.DetokenizeResponse(text=await asyncio.to_thread(self._tokenizer.decode, message.token_ids))

    async def get_model(self, message: pb.GetModelRequest, context: _Context) -> pb.GetModelResponse:
        """Describe the model."""
        self._check_model(message)
        return pb.GetModelResponse(model=self._model.description)

    async def list_models(self, message: pb.ListModelsRequest, context: _Context) -> pb.ListModelsResponse:
        """Describe the only model."""
        return pb.ListModelsResponse(models=[self._model.description])

    async def _request(self, message: _GenerateRequest, context: _Context) -> Request:
        arrival_s = self._engine.clock()
        # None without a deadline, which the published types leave out.
        remaining_s = cast("float | None", context.time_remaining())
        self._check_model(message)
        params = _sampling_params(message.options)
        source_ids = await self._source_ids(message)
        return Request(
            request_id=str(next(self._ids)),
            source_ids=source_ids,
            params=params,
            arrival_s=arrival_s,
            deadline_s=None if remaining_s is None else arrival_s + remaining_s,
        )

    def _submit(self, message: _GenerateRequest, request: Request) -> OutputStream:
        # A message costs CPU that the model needs: alone, a stream gets every token by itself; in a crowd, several.
        window_s = (self._num_streams + 1) / self._max_messages_per_s
        stream = OutputStream(request.request_id, coalesce_s=window_s)
        try:
            self._engine.submit(request, stream)
        except InvalidArgument as error:
            raise _in_terms_of(message, error) from None
        return stream

    async def _source_ids(self, message: _GenerateRequest) -> tuple[int, ...]:
        kind = message.WhichOneof("source")
        if kind is None:
            raise InvalidArgument("source", None, "set: text or token_ids")
        if kind == "text":
            await self._refuse_endless(message.text)
            ids = await self._encode(message.text)
        else:
            self._refuse_over(len(message.token_ids.ids), kind)
            ids = list(message.token_ids.ids)
        if not ids:
            found = message.text if kind == "text" else []
            raise InvalidArgument(kind, found, "not empty; white space alone counts as empty")
        eos_id = self._tokenizer.eos_id
        return (*ids,) if ids[-1] == eos_id else (*ids, eos_id)

    async def _refuse_endless(self, text: str) -> None:
        """Refuse a text that is certainly too long before it costs seconds of a core to count its tokens."""
        if len(text) > MAX_INLINE_LEN:
            self._refuse_over(await asyncio.to_thread(self._tokenizer.min_tokens, text), "text")

    def _refuse_over(self, least: int, field: str) -> None:
        limit = self._model.description.limits.max_source_len
        if least > limit:
            raise InvalidArgument(field, f"at least {least} tokens long", f"1 to {limit} tokens long")

    async def _encode(self, text: str) -> list[int]:
        if len(text) <= MAX_INLINE_LEN:
            return self._tokenizer.encode(text)
        # As a batch of one: `encode` keeps the interpreter lock, and with it the engine, until it is done.
        return (await asyncio.to_thread(self._tokenizer.encode_batch, [text]))[0]

    def _check_model(self, message: _NamesModel) -> None:
        name = self._model.description.name
        if message.model not in ("", name):
            raise ModelNotFound(f"model {message.model[:80]!r} is not served here; {name!r} is")


def _sampling_params(options: pb.GenerateOptions) -> SamplingParams:
    """Options as given, absent ones at their defaults. Raises InvalidArgument naming the wire's field."""
    given = {field.name: value for field, value in options.ListFields()}
    given.setdefault("seed", secrets.randbits(64))
    try:
        return SamplingParams(**given)
    except InvalidArgument as error:
        raise InvalidArgument(f"options.{error.field}", error.value, error.allowed) from None


def _in_terms_of(message: _GenerateRequest, error: InvalidArgument) -> InvalidArgument:
    """The engine's complaint with the field named as the client knows it."""
    field = message.WhichOneof("source") if error.field == "source" else f"options.{error.field}"
    return InvalidArgument(field or error.field, error.value, error.allowed)


def default_options() -> pb.GenerateOptions:
    """Values that absent options take."""
    params = SamplingParams()
    return pb.GenerateOptions(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)


def _last_response(text: str, event: TokenEvent, request: Request) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        text_delta=text,
        token_ids=event.token_ids,
        finish_reason=_finish_reason(event),
        usage=_usage(event, request),
        timing=_timing(event.timing),
        seed=request.params.seed,
    )


def _finish_reason(event: TokenEvent) -> pb.FinishReason.ValueType:
    """The wire's reason of a full answer. Raises what ended any other."""
    if event.error is not None:
        raise event.error
    reason = None if event.finish_reason is None else _FINISH_REASONS.get(event.finish_reason)
    if reason is None:
        raise EngineFault(f"the answer ended as {event.finish_reason}")
    return reason


def _usage(event: TokenEvent, request: Request) -> pb.Usage:
    return pb.Usage(source_tokens=len(request.source_ids), generated_tokens=event.num_generated)


def _timing(timing: Timing | None) -> pb.Timing | None:
    if timing is None:
        return None
    return pb.Timing(
        queued=_duration(timing.queued_s),
        time_to_first_token=_duration(timing.first_token_s),
        total=_duration(timing.total_s),
    )


def _duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
