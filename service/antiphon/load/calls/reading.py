"""Turns the messages of one request into its Reply: times, tokens, text, and the end of its only output."""

from __future__ import annotations

from collections.abc import Callable

from antiphon.load.calls.record import INCOMPLETE, OK, Outcome, Reply
from antiphon.v1 import inference_pb2 as pb

_OK = Outcome(OK)
_INCOMPLETE = Outcome(INCOMPLETE)


class Reading:
    """Reader of the messages to one request.

    start_s: time.monotonic() at the start of the run. on_first: called when the first message of a stream arrives.
    keeps_text: the reply gets the text of all outputs.
    """

    def __init__(self, reply: Reply, start_s: float, on_first: Callable[[], None], *, keeps_text: bool) -> None:
        self._reply = reply
        self._start_s = start_s
        self._on_first = on_first
        self._keeps_text = keeps_text
        self._texts: list[str] = []
        self._num_ends = 0
        self._previous_s = 0.0
        self._is_refused = False

    def delta(self, message: pb.GenerateResponse, now_s: float) -> None:
        """Note a message of a stream that arrived at a time of time.monotonic()."""
        reply, at_s = self._reply, now_s - self._start_s
        if reply.first_s is None:
            reply.first_s = at_s
            self._on_first()
        else:
            reply.gaps_s.append(at_s - self._previous_s)
        self._previous_s = at_s
        self._num_ends += message.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        if self._keeps_text:
            self._texts.append(message.text_delta)
        if message.HasField("usage"):
            reply.num_tokens = message.usage.generated_tokens

    def whole(self, message: pb.GenerateUnaryResponse) -> None:
        """Note a complete answer."""
        self._num_ends = len(message.outputs)
        self._reply.num_tokens = message.usage.generated_tokens
        self._texts = [output.text for output in message.outputs]

    def refused(self, outcome: Outcome, message: str) -> None:
        """Note an error."""
        self._is_refused = True
        self._reply.outcome, self._reply.message = outcome, message

    def end(self) -> None:
        """Complete the reply after the last message: its only output must have ended exactly once."""
        self._reply.text = "".join(self._texts)
        if self._is_refused:
            return
        if self._num_ends == 1:
            self._reply.outcome = _OK
        else:
            self._reply.outcome, self._reply.message = _INCOMPLETE, f"{self._num_ends} ends of one output"
