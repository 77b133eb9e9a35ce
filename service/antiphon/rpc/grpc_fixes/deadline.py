"""Time left of a call, correct even after the machine's clock was changed.

gRPC itself uses a monotonic clock for deadlines, and ends calls by it. But the time left that it reports to a Python
server is the difference of two wall clock readings, one of them derived from the start of the process: after the clock
is set forward by an hour, every deadline would seem to have passed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, cast

import grpc.aio

# Smaller differences arise because the two clocks are not read at the same moment.
_MIN_JUMP_S = 0.05


class TimeLimited(ABC):
    """Context of a part of a call, with its own time limit."""

    @abstractmethod
    def remaining_s(self) -> float | None:
        """Return the seconds left for this part, as the function of the same name does for a call."""


def _wall_ahead_s() -> float:
    return time.time() - time.monotonic()


_WALL_AHEAD_AT_START_S = _wall_ahead_s()


def remaining_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Return the seconds until a call's deadline, 0 once it has passed; None if there is none or it is unknown.

    It is unknown after the clock was set forward by more than the time left: gRPC's own timer then ends the call.
    """
    if isinstance(context, TimeLimited):
        return context.remaining_s()
    reported_s = cast("float | None", context.time_remaining())  # may be None, which grpc's type stubs omit
    jump_s = _wall_ahead_s() - _WALL_AHEAD_AT_START_S
    if reported_s is None or abs(jump_s) < _MIN_JUMP_S:
        return reported_s
    if reported_s == 0 and jump_s > 0:
        return None
    return max(0.0, reported_s + jump_s)
