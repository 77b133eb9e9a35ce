"""Frees the memory of gRPC's operations that fail, which grpc.aio leaks (grpc/grpc#43360).

grpc.aio passes the operations of a call to core in batches, and frees a batch when the task that waits for it resumes.
If the batch fails or the task is cancelled, grpc.aio frees nothing: each answer that its client did not read leaked
0.9 KB. In this module core's own callback finishes a batch, so no waiting task is needed.
Remove this module once grpcio frees batches itself: then tests/integration/test_failed_batches.py passes without it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

from grpc._cython import cygrpc  # type: ignore[attr-defined]

_Batch = Coroutine[Any, Any, None]
_Execute = Callable[[Any, tuple[Any, ...], asyncio.AbstractEventLoop], _Batch]


class _Completion:
    """Stand-in for the event loop and the future of a batch. It finishes the batch before the waiting task resumes.

    waiter: future that is done when core has completed the batch, successfully or not.
    """

    __slots__ = ("_batch", "_loop", "waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._batch: _Batch | None = None
        self.waiter: asyncio.Future[None] = loop.create_future()

    def start(self, execute: _Execute, call: object, operations: tuple[Any, ...]) -> None:
        """Pass a batch to core. Raises ExecuteBatchError when core rejects it."""
        self._batch = execute(call, operations, self)  # type: ignore[arg-type]
        self._batch.send(None)  # runs until it waits for core

    def create_future(self) -> _Completion:
        """Return the one future that a batch asks its event loop for."""
        return self

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: object) -> None:
        """Run a callback in the batch's event loop: immediately if that loop is running this code."""
        if asyncio.get_running_loop() is self._loop:
            callback(*args)
        else:
            self._loop.call_soon_threadsafe(callback, *args)

    def __await__(self) -> Iterator[None]:
        yield

    def cancelled(self) -> bool:
        """Return False always: core may still write to the batch."""
        return False

    def set_result(self, result: None) -> None:
        """Finish a batch that core has completed."""
        self._finish()
        if not self.waiter.done():
            self.waiter.set_result(result)

    def set_exception(self, error: Exception) -> None:
        """Finish a batch that has failed."""
        self._finish()
        if not self.waiter.done():
            self.waiter.set_exception(error)

    def _finish(self) -> None:
        """Let the batch read what core has written, and free its operations."""
        batch, self._batch = self._batch, None
        if batch is not None:
            with contextlib.suppress(StopIteration):
                batch.send(None)


def free_failed_batches() -> None:
    """Free the memory of all failed and cancelled batches of this process from now on, in all event loops."""
    if cygrpc.execute_batch.__module__ != __name__:
        cygrpc.execute_batch = _freeing(cygrpc.execute_batch)


def _freeing(execute: _Execute) -> Callable[..., Awaitable[None]]:
    def execute_batch(
        call: object, operations: tuple[Any, ...], loop: asyncio.AbstractEventLoop
    ) -> asyncio.Future[None]:
        completion = _Completion(loop)
        completion.start(execute, call, operations)
        return completion.waiter

    return execute_batch
