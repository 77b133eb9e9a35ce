"""CPU time of the stages of a request on the event loop, by wrapping their functions."""

from __future__ import annotations

import functools
import inspect
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from antiphon.observability.telemetry import Telemetry
from antiphon.rpc import middleware
from antiphon.rpc.middleware import CallMiddleware, LimitMiddleware, TelemetryMiddleware
from antiphon.rpc.v1.inputs import Inputs
from antiphon.rpc.v1.requests import RequestReader
from antiphon.rpc.v1.responses import Answer
from antiphon.rpc.v1.streaming import Submission

_STAGES: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("parsing", middleware, ("parsed",)),
    ("limits and places", CallMiddleware, ("begin", "begin_request", "end_request")),
    ("limits and places", TelemetryMiddleware, ("leave",)),
    ("limits and places", LimitMiddleware, ("check",)),
    ("record, log and metrics", Telemetry, ("begin", "begin_request", "end")),
    ("tokenising", Inputs, ("_ids",)),
    ("request", RequestReader, ("generate",)),
    ("queue", Submission, ("_submit",)),
    ("detokenising and message", Answer, ("delta", "whole")),
)
"""Name of each stage, and its functions. A function that calls one of another stage does not count that time."""


class StageTimes:
    """CPU seconds of each stage, of the thread that runs them."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner: list[int] = []  # nanoseconds of the stages within each open one

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Wrap the functions of all stages."""
        patches = [
            mock.patch.object(owner, name, self._wrapped(stage, getattr(owner, name)))
            for stage, owner, names in _STAGES
            for name in names
        ]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()

    @contextmanager
    def _in(self, stage: str) -> Iterator[None]:
        began_ns = time.thread_time_ns()
        self._inner.append(0)
        try:
            yield
        finally:
            took_ns = time.thread_time_ns() - began_ns
            self.seconds[stage] += (took_ns - self._inner.pop()) / 1e9
            if self._inner:
                self._inner[-1] += took_ns

    def _wrapped(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def measured_coroutine(*args: Any, **kwargs: Any) -> Any:
                return await _Steps(self, stage, function(*args, **kwargs))

            return measured_coroutine

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            with self._in(stage):
                return function(*args, **kwargs)

        return measured


class _Steps(Awaitable[Any]):
    """Awaits a coroutine and measures it, except while it is suspended."""

    def __init__(self, times: StageTimes, stage: str, coroutine: Any) -> None:
        self._times = times
        self._stage = stage
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        sent: Any = None
        while True:
            try:
                with self._times._in(self._stage):
                    awaited = self._coroutine.send(sent)
            except StopIteration as end:
                return end.value
            sent = yield awaited
