"""Converts the engine's events of a request to the contract's messages, and decodes the text of each output.

Raises the error that ended a request without a full answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from google.protobuf.duration_pb2 import Duration

from antiphon.domain.beam_steps import Beam, BeamStep
from antiphon.domain.errors import EngineFault
from antiphon.domain.request import FinishReason, Request, Timing, TokenEvent, TokenLogprob
from antiphon.domain.tasks import Generate
from antiphon.engine.stop_strings import StopFilter, TokenStopMatcher
from antiphon.text.tokenizer import IncrementalDecoder, Tokenizer
from antiphon.v1 import inference_pb2 as pb

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.STOP_SEQUENCE: pb.FINISH_REASON_STOP_SEQUENCE,
    FinishReason.TIME_LIMIT: pb.FINISH_REASON_TIME_LIMIT,
    FinishReason.EXHAUSTED: pb.FINISH_REASON_EXHAUSTED,
}


class Detokenizer:
    """Decoder of one request's tokens into text, from the end of its prefix to its stop strings.

    prefix_text: the prefix as its client wrote it, which the answer's text continues; empty if it was given as ids.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prefix_ids: Sequence[int], prefix_text: str, stop_strings: Sequence[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._prefix_ids = prefix_ids
        self._num_spaces = len(prefix_text) - len(prefix_text.rstrip())
        self._stop_strings = stop_strings

    def matcher(self) -> TokenStopMatcher:
        """Return the matcher of stop strings for one output, for the engine."""
        return TokenStopMatcher(self._stop_strings, self._decoder())

    def text(self) -> StopFilter:
        """Return the incremental text of one output, for the client."""
        return StopFilter(self._stop_strings, self._decoder())

    def _decoder(self) -> IncrementalDecoder:
        """Return a decoder that has read the prefix: the output's text continues it, leading space included.

        If the prefix ends with white space that its tokens have lost, that replaces the output's leading space.
        """
        decoder = self._tokenizer.stream()
        read = decoder.push(self._prefix_ids)
        if self._num_spaces and not read[-1:].isspace():
            decoder.skip_spaces(self._num_spaces)
        return decoder


class Answer:
    """Turns one request's events into messages."""

    def __init__(self, request: Generate, detokenizer: Detokenizer) -> None:
        self._request = request
        self._detokenizer = detokenizer
        self._texts: dict[int, StopFilter] = {}

    def delta(self, event: TokenEvent) -> pb.GenerateResponse | None:
        """Return the message of a stream's event; None if it has no content."""
        if event.error is not None:
            raise event.error
        text = self._push(event)
        if not (text or event.token_ids or event.finish_reason):
            return None
        # Sets rare fields only if needed: building a message costs as much as the rest of its processing.
        response = pb.GenerateResponse(text_delta=text, token_ids=event.token_ids)
        if event.output_index:
            response.output_index = event.output_index
        if event.logprobs:
            response.logprobs.extend(logprobs(event.logprobs))
        if event.finish_reason is not None:
            response.finish_reason = _finish_reason(event.finish_reason)
            self._end(response, event)
        return response

    def serialized_delta(self, event: TokenEvent) -> bytes:
        """Return the serialised message of a stream's event; empty if it has no content."""
        response = self.delta(event)
        return b"" if response is None else response.SerializeToString()

    def whole(self, events: Sequence[TokenEvent]) -> pb.GenerateUnaryResponse:
        """Return the message of all outputs, from their terminal events. Each event has all tokens of its output."""
        last = last_of(events)
        return pb.GenerateUnaryResponse(
            outputs=[self._output(event) for event in events],
            usage=usage(self._request, last),
            timing=timing(last.timing),
            seed=self._request.params.seed,
            beam_steps=beam_steps(last.beam_steps),
        )

    def _end(self, response: pb.GenerateResponse, event: TokenEvent) -> None:
        """Set the fields of an output's terminal message, and those of the request's last message."""
        if event.score is not None:
            response.score = event.score
        if event.is_last:
            response.usage.CopyFrom(usage(self._request, event))
            response.timing.CopyFrom(timing(event.timing))
            response.seed = self._request.params.seed
            if event.beam_steps:
                response.beam_steps.extend(beam_steps(event.beam_steps))

    def _output(self, event: TokenEvent) -> pb.Output:
        return pb.Output(
            output_index=event.output_index,
            text=self._push(event),
            token_ids=event.token_ids,
            finish_reason=_finish_reason(event.finish_reason),
            logprobs=logprobs(event.logprobs),
            score=event.score,
        )

    def _push(self, event: TokenEvent) -> str:
        text = self._texts.get(event.output_index)
        if text is None:
            text = self._texts[event.output_index] = self._detokenizer.text()
        pushed = text.push(event.token_ids)
        return pushed if event.finish_reason is None else pushed + text.finish()


def last_of(events: Sequence[TokenEvent]) -> TokenEvent:
    """Return the request's last event, given the terminal events of its outputs. Raises the error of an event."""
    for event in events:
        if event.error is not None:
            raise event.error
    return next((event for event in events if event.is_last), events[-1])


def logprobs(entries: Iterable[TokenLogprob]) -> list[pb.TokenLogprob]:
    """Return log-probabilities as messages."""
    return [
        pb.TokenLogprob(
            token_id=entry.token_id,
            logprob=entry.logprob,
            alternatives=[pb.Alternative(token_id=other, logprob=value) for other, value in entry.alternatives],
        )
        for entry in entries
    ]


def beam_steps(steps: Iterable[BeamStep]) -> list[pb.BeamStep]:
    """Return the steps of a beam search as messages."""
    return [pb.BeamStep(live=_beams(step.live), finished=_beams(step.finished)) for step in steps]


def usage(request: Request, event: TokenEvent) -> pb.Usage:
    """Return the token and block counts of a request, given its last event."""
    return pb.Usage(
        source_tokens=request.num_source_tokens,
        generated_tokens=event.num_generated,
        cache_blocks=event.cache_blocks,
    )


def timing(measured: Timing | None) -> pb.Timing:
    """Return the times of a request as a message; an empty one if nothing was measured."""
    if measured is None:
        return pb.Timing()
    return pb.Timing(
        queued=_duration(measured.queued_s),
        time_to_first_token=_duration(measured.first_token_s),
        total=_duration(measured.total_s),
    )


def _beams(beams: Iterable[Beam]) -> list[pb.Beam]:
    return [
        pb.Beam(parent=one.parent, token_id=one.token_id, total_logprob=one.total_logprob, score=one.score)
        for one in beams
    ]


def _finish_reason(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    known = None if reason is None else _FINISH_REASONS.get(reason)
    if known is None:
        raise EngineFault(f"the answer ended as {reason}")
    return known


def _duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    whole, nanos = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=nanos)
