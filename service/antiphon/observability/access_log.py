"""Access log: one line for every finished RPC with method, model, caller, work and status. Never text or tokens.

The line of a refusal has the reason and the field, not the message: that may quote the field's value.
"""

from __future__ import annotations

import logging
import time

from antiphon.domain.errors import InvalidArgument
from antiphon.observability.background_writer import BackgroundWriter
from antiphon.observability.call import AdmittedRequest, CallRecord
from antiphon.observability.metrics import MetricFamilies

log = logging.getLogger(__name__)

# Time in which further lines are collected to be written together.
_GATHER_S = 0.05


class AccessLog:
    """Sink that writes the lines of calls at level info, in a separate thread: standard error may be a full pipe.

    The event loop only puts a call into a queue. is_for_all: write lines for calls with status OK too.
    """

    def __init__(self, families: MetricFamilies, *, is_for_all: bool = True) -> None:
        self._is_for_all = is_for_all
        on_drop = families.log_lines_dropped.inc
        self._calls = BackgroundWriter("antiphon-access-log", _write, on_drop=on_drop, gather_s=_GATHER_S)

    def __call__(self, call: CallRecord) -> None:
        """Queue a finished call; never blocks."""
        if (self._is_for_all or call.code != "OK") and log.isEnabledFor(logging.INFO):
            self._calls.put((call, time.time()))

    def close(self, timeout_s: float) -> None:
        """Write the queued calls, for at most timeout_s. Blocks."""
        self._calls.close(timeout_s)


def _write(batch: list[tuple[CallRecord, float]]) -> None:
    for call, ended_s in batch:
        record = logging.LogRecord(log.name, logging.INFO, __file__, 0, "rpc", None, None)
        record.created = ended_s
        record.fields = fields_of(call)
        log.handle(record)


def fields_of(call: CallRecord) -> dict[str, object]:
    """Return the fields of a finished call in order of time; docs/OBSERVABILITY.md explains each field."""
    fields: dict[str, object] = {"method": call.method, "status": call.code, "request_id": call.request_id}
    if call.trace is not None:
        fields["trace_id"] = call.trace.trace_id
    fields["caller"] = call.caller
    if call.model_name:
        fields["model"] = call.model_name
    if call.requests:
        fields |= _work(call.requests)
    fields["total_ms"] = _milliseconds((call.ended_s or call.arrival_s) - call.arrival_s)
    if call.error is not None:
        fields["reason"] = call.error.reason
        if isinstance(call.error, InvalidArgument):
            fields["field"] = call.error.field
    return fields


def _work(requests: list[AdmittedRequest]) -> dict[str, object]:
    """Return the fields of the engine's work: times of the first request, tokens of all requests."""
    first = requests[0]
    fields: dict[str, object] = {
        "priority": first.request.priority.value,
        "source_tokens": sum(admitted.request.num_source_tokens for admitted in requests),
        "generated_tokens": sum(admitted.num_generated for admitted in requests),
        "finish_reasons": ",".join(reason.value for admitted in requests for reason in admitted.finish_reasons),
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
