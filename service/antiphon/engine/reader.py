"""Coroutine that reads a stream.

Not compiled: coroutines of mypyc 2.4 pass an exception on with three arguments of `throw`, which Python deprecates
since 3.12. Where warnings are errors, every cancelled call would end with that error instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def read_when(
    is_ready: Callable[[], bool], arrival: Callable[[], asyncio.Future[None]], take: Callable[[], T]
) -> T:
    """Wait until is_ready is true, and return what `take` returns. arrival: returns the future of the next change."""
    while not is_ready():
        await arrival()
    return take()
