"""One unanswered request of a GenerateMany call: its stream in the engine, and its answers as messages."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf.duration_pb2 import Duration

from antiphon.domain.cancellation import CancelCause
from antiphon.domain.errors import AntiphonError, InvalidArgument, QueueFull
from antiphon.domain.request import FinishReason, TokenEvent
from antiphon.observability.call import Call
from antiphon.rpc.status import forget_frames, pushback_ms
from antiphon.rpc.v1.answers.answers import Answer
from antiphon.rpc.v1.submission import Submitted
from antiphon.v1 import inference_pb2 as pb

# Memory of a request with its record, without its tokens, and of a token of its source.
_REQUEST_BYTES = 8 << 10
_SOURCE_TOKEN_BYTES = 40


class Cancelled(AntiphonError):
    """The client cancelled one request of a call."""

    status = AntiphonError.status.CANCELLED
    reason = "CANCELLED"


@dataclass(slots=True, eq=False)
class OpenRequest:
    """Unanswered request of a call. call: its own record. submitted: None until the engine has accepted it."""

    id: int
    is_whole: bool
    call: Call
    submitted: Submitted | None = None
    error: AntiphonError | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the request and of its unread answer."""
        if (work := self.submitted) is None:
            return _REQUEST_BYTES
        return _REQUEST_BYTES + _SOURCE_TOKEN_BYTES * work.request.num_source_tokens + work.stream.unread_bytes

    def write_to(self, response: pb.GenerateManyResponse) -> bool:
        """Add the answers that it has now. Return whether its last answer is among them."""
        if self.error is not None or self.submitted is None:
            return self._fail(response, self.error or Cancelled("the request was cancelled"))
        events = self.submitted.stream.take()
        try:
            return self._add(response, self.submitted.answer, events)
        except AntiphonError as error:
            return self._fail(response, error)

    def give_up(self, cause: CancelCause) -> None:
        """Cancel its work. If it has its answer already, it counts as one that was not read."""
        if self.submitted is not None:
            self.submitted.engine.give_up(self.submitted.stream, cause)

    def _add(self, response: pb.GenerateManyResponse, answer: Answer, events: list[TokenEvent]) -> bool:
        for event in events:
            if event.finish_reason is FinishReason.CANCELLED and event.error is None:
                raise Cancelled("the client cancelled the request")
        if self.is_whole:
            response.answers.add(id=self.id, whole=answer.whole(events))
        else:
            for event in events:
                if (delta := answer.delta(event)) is not None:
                    response.answers.add(id=self.id, delta=delta)
        is_last = self.is_whole or any(event.is_last for event in events)
        if is_last:
            self.call.code = "OK"
        return is_last

    def _fail(self, response: pb.GenerateManyResponse, error: AntiphonError) -> bool:
        forget_frames(error)
        self.call.code, self.call.error = error.status.name, error
        response.answers.add(id=self.id, failure=_failure(error))
        return True


def _failure(error: AntiphonError) -> pb.Failure:
    failure = pb.Failure(code=grpc.StatusCode[error.status.name].value[0], message=str(error), reason=error.reason)
    if isinstance(error, InvalidArgument):
        failure.field = error.field
    if isinstance(error, QueueFull):
        delay = Duration()
        delay.FromMilliseconds(pushback_ms(error))
        failure.retry_after.CopyFrom(delay)
    return failure
