"""One line for every RPC that is over: what was asked of which model, by whom, and how it went. Never text or tokens.

Of a refusal it gives the reason and the field; the message, which may quote the field's value, goes to the client only.
"""

from __future__ import annotations

import logging
import time

from antiphon.service.domain.errors import InvalidArgument
from antiphon.service.observability.background_writer import BackgroundWriter
from antiphon.service.observability.call import Asked, Call
from antiphon.service.observability.metric_families import MetricFamilies

log = logging.getLogger(__name__)

# How long a line may wait for others to be written with it.
_GATHER_S = 0.05


class AccessLog:
    """A sink of calls that writes their lines, at info, from a thread of its own: standard error may be a full pipe.

    Until then a call costs the event loop nothing but its place in a queue. is_for_all: also of those that ended well.
    """

    def __init__(self, families: MetricFamilies, *, is_for_all: bool = True) -> None:
        self._is_for_all = is_for_all
        on_drop = families.log_lines_dropped.inc
        self._calls = BackgroundWriter("antiphon-access-log", _write, on_drop=on_drop, gather_s=_GATHER_S)

    def __call__(self, call: Call) -> None:
        """Take a call that is over; at once."""
        if (self._is_for_all or call.code != "OK") and log.isEnabledFor(logging.INFO):
            self._calls.put((call, time.time()))

    def close(self, timeout_s: float) -> None:
        """Write what was taken, for at most so many seconds. Blocks."""
        self._calls.close(timeout_s)


def _write(batch: list[tuple[Call, float]]) -> None:
    for call, ended_s in batch:
        record = logging.LogRecord(log.name, logging.INFO, __file__, 0, "rpc", None, None)
        record.created = ended_s
        record.fields = fields_of(call)
        log.handle(record)


def fields_of(call: Call) -> dict[str, object]:
    """What is known of a call that is over, in the order of its life; docs/OBSERVABILITY.md explains each field."""
    fields: dict[str, object] = {"method": call.method, "status": call.code, "request_id": call.request_id}
    if call.trace is not None:
        fields["trace_id"] = call.trace.trace_id
    fields["caller"] = call.caller
    if call.model_name:
        fields["model"] = call.model_name
    if call.asked:
        fields |= _work(call.asked)
    fields["total_ms"] = _milliseconds((call.ended_s or call.arrival_s) - call.arrival_s)
    if call.error is not None:
        fields["reason"] = call.error.reason
        if isinstance(call.error, InvalidArgument):
            fields["field"] = call.error.field
    return fields


def _work(asked: list[Asked]) -> dict[str, object]:
    """What the engine did: times of the first request, tokens of all."""
    first = asked[0]
    fields: dict[str, object] = {
        "priority": first.request.priority.value,
        "source_tokens": sum(one.request.num_source_tokens for one in asked),
        "generated_tokens": sum(one.num_generated for one in asked),
        "finish_reasons": ",".join(reason.value for one in asked for reason in one.finish_reasons),
    }
    if (cause := first.stream.cancel_cause) is not None:
        fields["cancel_cause"] = cause.value
    if (timing := first.timing) is not None:
        if timing.queued_s is not None:
            fields["queue_ms"] = _milliseconds(timing.queued_s)
        if timing.first_token_s is not None:
            fields["ttft_ms"] = _milliseconds(timing.first_token_s)
    return fields


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
