"""Panels of queue, batches and the delays of engine and event loop."""

from __future__ import annotations

from deploy.dashboards.queries import REPLICA, REPLICA_LEGEND, mean, of_model, of_process, rate, rising, total
from deploy.dashboards.shapes import BAD, GOOD, WARNING, About, Panel, lines


def panels() -> list[Panel]:
    """Return the panels of queue, batches, preemptions and delays."""
    return [*_queue(), *_steps(), *_pace()]


WAITING = About(
    title="Waiting",
    text="Requests in the queue of each replica. Good: below 5; above 5, autoscaling adds replicas.",
    unit="none",
    runbook="AntiphonQueueGrowing",
)
RUNNING = About(
    title="Running",
    text="Running requests of each replica, at most max_num_seqs. Good: similar on all replicas.",
    unit="none",
    runbook="AntiphonNoProgress",
)
WAIT = About(
    title="Expected wait",
    text="Estimated time to serve all waiting requests, by which requests are refused. Good: below 1 s.",
    unit="s",
    runbook="AntiphonQueueWaitHigh",
)


def _queue() -> list[Panel]:
    limits = [(0, GOOD), (5, WARNING), (20, BAD)]
    return [
        lines(WAITING, {REPLICA_LEGEND: total(of_model("num_requests_waiting"), REPLICA)}, limits=limits),
        lines(RUNNING, {REPLICA_LEGEND: total(of_model("num_requests_running"), REPLICA)}),
        lines(WAIT, {REPLICA_LEGEND: f"max by ({REPLICA}) ({of_model('expected_wait_seconds')})"}),
    ]


BATCHES = About(
    title="Batches",
    text="Means: rows of a decoder step, rows empty while requests wait, sources of an encoder run, tokens "
    "in a stream message. "
    "Good: rows grow with the load, because all rows of a step share one read of the weights.",
    unit="none",
)
PREEMPTED = About(
    title="Preemptions",
    text="Preemptions per second, and preempted requests that wait to continue. "
    "Good: none; otherwise raise kv_cache_blocks or lower max_num_seqs.",
    unit="none",
    runbook="AntiphonPreempting",
)
BACKLOG = About(
    title="Waiting tokens",
    text="Source tokens of waiting requests: a few long sources take longer than many short ones.",
    unit="short",
)


def _steps() -> list[Panel]:
    messages = rising(total(rate(of_model("stream_messages_total"))))
    return [
        lines(
            BATCHES,
            {
                "rows a step": mean("decode_batch_size"),
                "empty rows": total(rate(of_model("empty_row_seconds_total"))),
                "sources a run": mean("encode_batch_size"),
                "tokens a message": f"{total(rate(of_model('generation_tokens_total')))} / {messages}",
            },
        ),
        lines(
            PREEMPTED,
            {
                "preemptions a second": total(rate(of_model("preemptions_total"))),
                "waiting to go on": total(of_model("num_requests_preempted")),
            },
        ),
        lines(BACKLOG, {REPLICA_LEGEND: total(of_model("num_tokens_waiting"), REPLICA)}),
    ]


LATE = About(
    title="Delays of event loop and engine",
    text="Delay of the event loop, and time since the current step began. "
    "Good: milliseconds; after watchdog_timeout_s, the engine is reported as stuck.",
    unit="s",
    runbook="AntiphonEventLoopLate",
)
FLIGHT = About(
    title="Open calls",
    text="RPCs that have not ended, replicas whose engine is stuck, and replicas that accept no further connections. "
    "Calls that stay open while no request runs are streams that no client reads.",
    unit="none",
    runbook="AntiphonEngineStuck",
)
LOST = About(
    title="Dropped lines, calls and connections",
    text="Rates of dropped log lines and spans, of calls given up because their client did not read or send, and "
    "of connections that were closed because they reset their calls. Good: none.",
    unit="none",
)


def _pace() -> list[Panel]:
    return [
        lines(
            LATE,
            {
                f"loop {REPLICA_LEGEND}": of_process("antiphon_event_loop_lag_seconds"),
                f"step {REPLICA_LEGEND}": f"max by ({REPLICA}) ({of_model('engine_last_step_age_seconds')})",
            },
        ),
        lines(
            FLIGHT,
            {
                "calls": total(of_process("antiphon_grpc_server_in_flight")),
                "stuck engines": total(of_model("engine_stuck")),
                "full ports": total(of_process("antiphon_connections_full")),
                "waiting for client, {{stage}}": total(of_process("antiphon_calls_waiting_for_client"), "stage"),
            },
        ),
        lines(
            LOST,
            {
                "log lines": total(rate(of_process("antiphon_log_lines_dropped_total"))),
                "spans, {{reason}}": total(rate(of_process("antiphon_spans_dropped_total")), "reason"),
                "calls, {{stage}}": total(rate(of_process("antiphon_calls_given_up_total")), "stage"),
                "connections": total(rate(of_process("antiphon_connections_closed_total"))),
            },
        ),
    ]
