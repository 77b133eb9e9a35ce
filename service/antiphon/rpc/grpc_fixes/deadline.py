"""Deadline of a call, correct even after the machine's clock was changed.

Cause: gRPC itself uses a monotonic clock for deadlines, and ends calls by it. But the time left that it reports to a
Python server is the difference of two wall clock readings, one of them derived from the start of the process: after the
clock is set forward by an hour, every deadline would seem to have passed.
Upstream: no issue is known; `_ServicerContext.time_remaining` of grpc.aio reads `time.time()` (seen in grpcio 1.85).
Cost: two clock readings a call.
Remove this module once `time_remaining` uses a monotonic clock: then tests/unit/calls/test_clocks.py passes without it.
"""

from __future__ import annotations

import time
from typing import Any, cast

import grpc.aio

# Smaller differences arise because the two clocks are not read at the same moment.
_MIN_JUMP_S = 0.05


def _wall_ahead_s() -> float:
    return time.time() - time.monotonic()


_WALL_AHEAD_AT_START_S = _wall_ahead_s()


def monotonic_deadline_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Return the deadline of a call that has begun now, as a time of `time.monotonic`.

    None if there is none or it is unknown: that is so if the clock was set forward by more than the time left. gRPC's
    own timer then ends the call.
    """
    now_s = time.monotonic()
    reported_s = cast("float | None", context.time_remaining())  # may be None, which grpc's type stubs omit
    if reported_s is None:
        return None
    jump_s = _wall_ahead_s() - _WALL_AHEAD_AT_START_S
    if abs(jump_s) < _MIN_JUMP_S:
        return now_s + reported_s
    if reported_s == 0 and jump_s > 0:
        return None
    return now_s + max(0.0, reported_s + jump_s)
