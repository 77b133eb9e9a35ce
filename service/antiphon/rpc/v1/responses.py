"""Converts the engine's events of a request to the contract's messages, and decodes the text of each output.

Raises the error that ended a request without a full answer. Outputs of encoder heads become labels, tagged tokens and
spans, or filled positions.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from antiphon.domain.errors import EngineFault
from antiphon.domain.request import (
    Beam,
    BeamStep,
    EncoderOutputs,
    FinishReason,
    Request,
    Timing,
    TokenEvent,
    TokenLogprob,
)
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

    def __init__(self, request: Request, detokenizer: Detokenizer) -> None:
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
            alternatives=[pb.Alternative(token_id=token_id, logprob=value) for token_id, value in entry.alternatives],
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
        candidate_tokens=0 if request.candidate_ids is None else len(request.candidate_ids),
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
        pb.Beam(parent=beam.parent, token_id=beam.token_id, total_logprob=beam.total_logprob, score=beam.score)
        for beam in beams
    ]


def _finish_reason(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    number = None if reason is None else _FINISH_REASONS.get(reason)
    if number is None:
        raise EngineFault(f"the answer ended as {reason}")
    return number


def _duration(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    whole, nanos = divmod(round(seconds * 1e9), 1_000_000_000)
    return Duration(seconds=whole, nanos=nanos)


_OUTSIDE = "O"
# Scripts without spaces between words: Thai and Lao, Myanmar, Khmer, kana and ideographs. Each character is a word.
_UNSPACED = (
    range(0x0E00, 0x0F00),
    range(0x1000, 0x10A0),
    range(0x1780, 0x1800),
    range(0x2E80, 0xA000),
    range(0xF900, 0xFB00),
    range(0x20000, 0x40000),
)


def label_scores(outputs: EncoderOutputs, labels: Sequence[str], top_k: int) -> list[pb.LabelScore]:
    """Return labels with their scores, best first: `top_k` of them, or all if it is 0."""
    scores = outputs.values[0].tolist()
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [pb.LabelScore(label=labels[index], score=scores[index]) for index in order[: top_k or None]]


def tagged_tokens(
    outputs: EncoderOutputs, labels: Sequence[str], token_ids: Sequence[int], offsets: Sequence[tuple[int, int]]
) -> list[pb.TaggedToken]:
    """Return the likeliest label of each token of a text; the first one of equal scores."""
    best = outputs.values.argmax(axis=1).tolist()
    return [
        pb.TaggedToken(token_id=token_id, start=start, end=end, label=labels[index], score=float(scores[index]))
        for token_id, (start, end), index, scores in zip(token_ids, offsets, best, outputs.values, strict=True)
    ]


def tagged_spans(text: str, tokens: Sequence[pb.TaggedToken]) -> list[pb.TaggedSpan]:
    """Return spans of neighbouring words with one label. B- or another label begins a new span; O is in no span."""
    spans: list[list[_Word]] = []
    before: _Word | None = None
    for word in _words(text, tokens):
        if word.label != _OUTSIDE:
            if before is not None and before.kind == word.kind and not word.label.startswith("B-"):
                spans[-1].append(word)
            else:
                spans.append([word])
        before = None if word.label == _OUTSIDE else word
    return [
        pb.TaggedSpan(
            start=words[0].start,
            end=words[-1].end,
            label=words[0].kind,
            score=sum(word.score for word in words) / len(words),
        )
        for words in spans
    ]


def masked_places(outputs: EncoderOutputs, positions: Sequence[int], tokenizer: Tokenizer) -> list[pb.MaskedPlace]:
    """Return the proposed tokens for each masked position, likeliest first."""
    assert outputs.token_ids is not None
    return [
        pb.MaskedPlace(
            position=position,
            fillings=[
                pb.Filling(token_id=token_id, text=_text_of(token_id, tokenizer), score=score)
                for token_id, score in zip(ids, scores, strict=True)
            ],
        )
        for position, ids, scores in zip(positions, outputs.token_ids.tolist(), outputs.values.tolist(), strict=True)
    ]


@dataclass(kw_only=True, slots=True)
class _Word:
    """Word with the label of its first token."""

    start: int
    end: int
    label: str
    score: float

    @property
    def kind(self) -> str:
        """Label without its prefix B- or I-."""
        return self.label[2:] if self.label.startswith(("B-", "I-")) else self.label


def _words(text: str, tokens: Sequence[pb.TaggedToken]) -> Iterator[_Word]:
    """Yield the words that tokens are pieces of. Splits as BERT does: at spaces and around every punctuation mark."""
    word: _Word | None = None
    for token in tokens:
        start, end = _trimmed(text, token.start, token.end)
        if start == end:
            continue
        if word is not None and _is_inside(text, word.end, start):
            word.end = max(word.end, end)
            continue
        if word is not None:
            yield word
        word = _Word(start=start, end=end, label=token.label, score=token.score)
    if word is not None:
        yield word


def _trimmed(text: str, start: int, end: int) -> tuple[int, int]:
    """Return the bounds of a token without white space, which some vocabularies include in tokens."""
    while start < end and text[start].isspace():
        start += 1
    while start < end and text[end - 1].isspace():
        end -= 1
    return start, end


def _is_inside(text: str, end: int, start: int) -> bool:
    """Return whether a token at `start` continues the word that ends at `end`. Byte tokens of one character do."""
    return start < end or (start == end and _is_word_char(text[end - 1]) and _is_word_char(text[start]))


def _is_word_char(char: str) -> bool:
    if any(ord(char) in script for script in _UNSPACED):
        return False
    return char.isalnum() or unicodedata.category(char).startswith("M")


def _text_of(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token's text, or its name if it has no text."""
    return tokenizer.decode([token_id]) or tokenizer.piece(token_id)
