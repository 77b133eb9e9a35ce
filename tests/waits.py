"""Limits on calls that wait for their clients, and waits for conditions that no event reports, for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from antiphon.rpc.client_waits import ClientWaits, Stage, WaitLimits


def client_waits(
    *,
    request_timeout_s: float = 60.0,
    answer_timeout_s: float = 60.0,
    max_requests: int = 256,
    max_unsent_bytes: int = 1 << 26,
    given_up: list[tuple[Stage, str]] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ClientWaits:
    """Build the limits. clock: replaces the machine's. given_up: called with stage and cause of an abandoned call."""
    limits = WaitLimits(
        request_timeout_s=request_timeout_s,
        answer_timeout_s=answer_timeout_s,
        max_requests=max_requests,
        max_unsent_bytes=max_unsent_bytes,
    )
    noted = [] if given_up is None else given_up
    return ClientWaits(limits, lambda stage, cause: noted.append((stage, cause)), clock)


async def comes_true(condition: Callable[[], object], patience_s: float = 60) -> None:
    """Poll a condition that becomes true later, and that no event reports."""
    async with asyncio.timeout(patience_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)
