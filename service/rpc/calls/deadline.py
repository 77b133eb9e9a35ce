"""How much time a call has left, whatever becomes of the machine's clock.

gRPC itself keeps deadlines by a clock that never jumps, and ends calls by it. What it tells a Python server is however
the difference of two readings of the wall clock, one of them made from the time at which the process began: after the
clock was set forward by an hour, every deadline would seem to have passed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, cast

import grpc.aio

# Differences below it are those of two clocks that are not read in the same moment.
_MIN_JUMP_S = 0.05


class Limited(ABC):
    """A call's context for a part of it, with a time limit of its own."""

    @abstractmethod
    def remaining_s(self) -> float | None:
        """As the function of this name, of the part."""


def _wall_ahead_s() -> float:
    return time.time() - time.monotonic()


_WALL_AHEAD_AT_START_S = _wall_ahead_s()


def remaining_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Seconds until a call's deadline, 0 once it has passed; None where it has none, or where nobody can tell.

    The latter after the clock was set forward by more than the call has left: gRPC's own timer then ends the call.
    """
    if isinstance(context, Limited):
        return context.remaining_s()
    told_s = cast("float | None", context.time_remaining())  # None, which the published types leave out
    jump_s = _wall_ahead_s() - _WALL_AHEAD_AT_START_S
    if told_s is None or abs(jump_s) < _MIN_JUMP_S:
        return told_s
    if told_s == 0 and jump_s > 0:
        return None
    return max(0.0, told_s + jump_s)
