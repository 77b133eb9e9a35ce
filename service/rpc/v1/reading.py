"""An answer on its way to whoever asked: gives the request up where its reader leaves before the end, and says why.

For every face of the server. Knows no message; what is written, and how, is the servicer's business.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import grpc.aio

from antiphon.service.domain.cancellation import CancelCause
from antiphon.service.domain.errors import AntiphonError, SlowReader
from antiphon.service.domain.request import Request
from antiphon.service.engine.engine import Engine
from antiphon.service.engine.stream import OutputStream
from antiphon.service.observability.call import current_call

# A client that gives up at its deadline may be heard before the deadline that it told us: grpc rounds that up to 1 %.
_ROUNDING = 0.01
_CLOCKS_APART_S = 0.02


@contextlib.contextmanager
def reading(engine: Engine, request: Request, stream: OutputStream) -> Iterator[None]:
    """Read a submitted request's stream and pass it on; an exception that leaves the context gives the request up.

    An AntiphonError other than SlowReader does not: it is how the engine ended it. The RPC under way, if any, is told
    how the request ends.
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
    except (asyncio.CancelledError, grpc.aio.BaseError):  # the latter where nothing can be sent any more
        is_late = _has_run_out(request, engine.clock())
        engine.give_up(stream, CancelCause.DEADLINE if is_late else CancelCause.CLIENT)
        raise
    except Exception:
        engine.give_up(stream, CancelCause.FAULT)
        raise


def _has_run_out(request: Request, now_s: float) -> bool:
    if request.deadline_s is None:
        return False
    early_s = _ROUNDING * (request.deadline_s - request.arrival_s) + _CLOCKS_APART_S
    return now_s >= request.deadline_s - early_s
