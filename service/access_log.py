"""One line for every RPC that is over: what was asked of which model, by whom, and how it went. Never text or tokens.

Of a refusal it gives the reason and the field; the message, which may quote the field's value, goes to the client only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from antiphon.service.call import Asked, Call
from antiphon.service.errors import InvalidArgument

log = logging.getLogger(__name__)


def log_call(call: Call) -> None:
    """Write the line, at info."""
    if log.isEnabledFor(logging.INFO):
        # By hand: log.info would look through the stack for its caller, which is half of the price.
        record = logging.LogRecord(log.name, logging.INFO, __file__, 0, "rpc", None, None)
        record.fields = fields_of(call)
        log.handle(record)


def access_logs(kind: str) -> tuple[Callable[[Call], None], ...]:
    """What writes the lines of all calls, of those in error, or of none."""
    return {"all": (log_call,), "errors": (log_failed_call,), "none": ()}[kind]


def log_failed_call(call: Call) -> None:
    """Write the line of a call that did not end well."""
    if call.code != "OK":
        log_call(call)


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
        "generated_tokens": sum(0 if one.end is None else one.end.num_generated for one in asked),
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
