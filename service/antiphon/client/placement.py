"""Connections to the processes of a server: one to each, as far as the kernel gives them.

A server of several processes says in a trailer of GenerateMany which of them has answered. Opens no connection:
`async_channels.py` and `sync_channels.py` ask, and keep or close each connection as it is said here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc

WORKER_KEY = "antiphon-worker"
"""Trailer with the index of the process that answered and the number of processes, such as 0/2."""

# Attempts for each connection: 16 of 2 processes leave one out in 1 of 65,000 cases, and take 20 ms on one machine.
_ATTEMPTS_EACH = 16


@dataclass(frozen=True, slots=True)
class Offer:
    """Answer to a GenerateMany call without requests.

    is_known: whether the server knows the method; None if it cannot be reached. worker, num_workers: the process that
    answered, of how many.
    """

    is_known: bool | None
    worker: int = 0
    num_workers: int = 1


def offer_of(code: grpc.StatusCode, trailers: Iterable[Any] | None) -> Offer:
    """Return the offer of a call that has ended."""
    is_known = {grpc.StatusCode.OK: True, grpc.StatusCode.UNIMPLEMENTED: False}.get(code)
    place = next((value for key, value in trailers or () if key == WORKER_KEY), "0/1")
    worker, _, num_workers = str(place).partition("/")
    return Offer(is_known, int(worker), int(num_workers))


class Placement:
    """Choice among connections: one to each process of the server whose first answer this is."""

    def __init__(self, first: Offer) -> None:
        self._num_workers = first.num_workers
        self._reached = {first.worker}
        self._num_left = _ATTEMPTS_EACH * (first.num_workers - 1)

    def wants_more(self) -> bool:
        """Return whether to open another connection, and count it as an attempt."""
        self._num_left -= 1
        return self._num_left >= 0 and len(self._reached) < self._num_workers

    def keeps(self, offer: Offer) -> bool:
        """Return whether to keep a connection that was answered like this."""
        is_new = offer.is_known is True and offer.worker not in self._reached
        if is_new:
            self._reached.add(offer.worker)
        return is_new
