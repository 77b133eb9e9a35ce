"""Server of tests/serving.py or tests/bundle_serving.py in a separate thread, for tests that are not asynchronous."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Generic, Self, TypeVar

Served = TypeVar("Served")
PATIENCE_S = 60


class Background(Generic[Served]):
    """Enters an asynchronous context in a thread with an event loop. `served` is its result.

    Leaving raises the errors of leaving the context, so its assertions fail the test.
    """

    def __init__(self, enter: Callable[[], AbstractAsyncContextManager[Served]]) -> None:
        self._enter = enter
        self._is_ready = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="server")

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_ready.wait()
        self._raise()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._raise()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # raised in the waiting caller
            self._error = error
        self._is_ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self._enter() as self.served:
            self._is_ready.set()
            await self._stop.wait()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
