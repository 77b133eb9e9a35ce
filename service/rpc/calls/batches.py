"""Frees the memory of gRPC's operations that fail, which grpc.aio leaks (grpc/grpc#43360).

grpc.aio gives core the operations of a call in batches, and frees a batch when the task that waits for it goes on.
Where a batch fails, or the task is cancelled, it frees nothing: each answer that its client did not read left 0.9 KB
behind. Here core's own callback finishes a batch, whoever waits for it.
To be removed once grpcio frees them itself: tests/integration/test_failed_batches.py shows whether it does.
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
    """What gRPC takes for both the event loop and the future of a batch: it finishes the batch before its waiter.

    waiter: done when core is done with the batch, in whatever way.
    """

    __slots__ = ("_batch", "_loop", "waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._batch: _Batch | None = None
        self.waiter: asyncio.Future[None] = loop.create_future()

    def start(self, execute: _Execute, call: object, operations: tuple[Any, ...]) -> None:
        """Give a batch to core. Raises ExecuteBatchError where core does not take it."""
        self._batch = execute(call, operations, self)  # type: ignore[arg-type]
        self._batch.send(None)  # up to where it waits for core

    def create_future(self) -> _Completion:
        """As of an event loop: the one future that a batch asks for."""
        return self

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: object) -> None:
        """As of an event loop. gRPC calls it in the running one, which saves most callbacks a turn."""
        if asyncio.get_running_loop() is self._loop:
            callback(*args)
        else:
            self._loop.call_soon_threadsafe(callback, *args)

    def __await__(self) -> Iterator[None]:
        yield

    def cancelled(self) -> bool:
        """As of a future. Never: core may still write to the batch."""
        return False

    def set_result(self, result: None) -> None:
        """As of a future: the batch is complete."""
        self._finish()
        if not self.waiter.done():
            self.waiter.set_result(result)

    def set_exception(self, error: Exception) -> None:
        """As of a future: the batch has failed."""
        self._finish()
        if not self.waiter.done():
            self.waiter.set_exception(error)

    def _finish(self) -> None:
        """Let the batch take what core has written, and free the rest."""
        batch, self._batch = self._batch, None
        if batch is not None:
            with contextlib.suppress(StopIteration):
                batch.send(None)


def free_failed_batches() -> None:
    """Free from now on what failed and cancelled batches of this process hold, whichever loop they belong to."""
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
