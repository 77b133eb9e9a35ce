"""The asyncio tasks that gRPC runs for a call, and the one way to end a call that its client keeps open.

gRPC's asyncio server runs two tasks for each call: one waits until the call is over, and its child runs the handler. A
client that does not read the end of its answer keeps both, and the answer, for as long as its connection lasts, and
gRPC offers no method against it. When both tasks are cancelled, gRPC drops its last reference to the call, and core
ends the stream: tests/integration/test_unread_answers.py holds a new version of gRPC to that.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Generator
from typing import Any

# gRPC's coroutine around a handler.
_HANDLER = "_handle_exceptions"

Coro = Coroutine[Any, Any, Any] | Generator[Any, None, Any]


class _HandlerTask(asyncio.Task[Any]):
    """A task that runs a handler. call_task: its parent, which ends with the call; None where there is none."""

    __slots__ = ("call_task",)
    call_task: asyncio.Task[Any] | None


def follow_calls(loop: asyncio.AbstractEventLoop) -> None:
    """Remember from now on which task each handler of this loop belongs to."""
    loop.set_task_factory(_make_task)


def current_handler() -> asyncio.Task[Any]:
    """Return the task of the handler under way."""
    task = asyncio.current_task()
    assert task is not None
    return task


def end_call(handler: asyncio.Task[Any]) -> None:
    """End the call of a handler, even where its answer cannot be written: the client sees its stream end."""
    if isinstance(handler, _HandlerTask) and handler.call_task is not None:
        handler.call_task.cancel()
    handler.cancel()


def call_task_of(handler: asyncio.Task[Any]) -> asyncio.Task[Any]:
    """Return the task that ends when the call of a handler is over for both sides."""
    call_task = handler.call_task if isinstance(handler, _HandlerTask) else None
    return call_task or handler


def _make_task(
    loop: asyncio.AbstractEventLoop, coro: Coro, *, context: contextvars.Context | None = None, name: str | None = None
) -> asyncio.Task[Any]:
    if getattr(coro, "__name__", "") != _HANDLER:
        return asyncio.Task(coro, loop=loop, context=context, name=name)
    task = _HandlerTask(coro, loop=loop, context=context, name=name)
    task.call_task = asyncio.current_task(loop)
    return task
