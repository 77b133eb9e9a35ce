"""Cancels a request whose client leaves before the end of its answer, and records the cause.

All services use it. Knows no messages: the servicers write them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc.aio

from antiphon.domain.cancellation import CancelCause
from antiphon.domain.errors import AntiphonError, SlowReader
from antiphon.domain.request import Request
from antiphon.engine.engine import Engine
from antiphon.engine.stream import OutputStream
from antiphon.observability.call import current_call

# A client's cancellation at its deadline may arrive before the deadline that it sent: grpc rounds that up by up to 1 %.
_ROUNDING = 0.01
_CLOCKS_APART_S = 0.02


@contextlib.contextmanager
def reading(engine: Engine, request: Request, stream: OutputStream) -> Iterator[None]:
    """Read a submitted request's stream within the context. An exception that leaves the context cancels the request.

    An AntiphonError other than SlowReader does not, since it comes from the engine, which has ended the request. The
    current RPC, if any, records the end of the request.
    """
    if (call := current_call()) is not None:
        call.admitted(request, stream)
    try:
        yield
    except SlowReader:
        engine.give_up(stream, CancelCause.SLOW_READER)
        raise
    except AntiphonError:
        raise
    except (asyncio.CancelledError, grpc.aio.BaseError):  # BaseError: nothing can be sent any more
        engine.give_up(stream, cause_of_leaving(request, engine.clock()))
        raise
    except Exception:
        engine.give_up(stream, CancelCause.FAULT)
        raise


def cause_of_leaving(request: Request, now_s: float) -> CancelCause:
    """Return why a client ended the call of a request now: its deadline, or its own wish."""
    return CancelCause.DEADLINE if _has_run_out(request, now_s) else CancelCause.CLIENT


def _has_run_out(request: Request, now_s: float) -> bool:
    if request.deadline_s is None:
        return False
    early_s = _ROUNDING * (request.deadline_s - request.arrival_s) + _CLOCKS_APART_S
    return now_s >= request.deadline_s - early_s
