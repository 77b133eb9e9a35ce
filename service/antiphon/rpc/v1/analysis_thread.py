"""One thread of a model for calls that compute beside its engine: Explain, NextToken and GetPositions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from antiphon.engine.engine import Engine

_T = TypeVar("_T")


class AnalysisThread:
    """Runs the work of one call at a time, in the order of the calls. For the event loop.

    All these calls together take one core from the engine. The memory of a forward pass stays with each thread that
    ran one (20 MB for the explain graph of the shipped model), so they share one thread.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, "analysis")

    async def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of the work. Raises Unavailable while the engine drains, and every error of the work."""
        self._engine.check_accepting()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
