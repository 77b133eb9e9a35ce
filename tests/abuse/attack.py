"""The terms of every attack: its size, and its report of what it sent."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from tests.abuse.raw_connection import CLOSED, OPEN, Address, RawConnection


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Bounds of an attack.

    connections: at once. calls: held on each connection. frames: of a flood, on each connection; calls that are reset
    count as frames. storm: connections opened one after the other, by each of `connections`, or in all where they are
    held. hold_s: the longest time that an attack waits for the server to end what it holds open. unread_s: time
    that a socket is not read. interval_s: between the bytes of slow senders and slow readers.
    """

    connections: int
    calls: int
    frames: int
    storm: int
    hold_s: float
    unread_s: float
    interval_s: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Record of one attack.

    whole: calls by method that the server must have counted. partial: calls that it may have seen or not, because they
    were reset, or their connection ended, before it answered. ends: how streams or connections ended, by number.
    breaches: what the server let happen and must not, in words.
    """

    whole: Counter[str] = field(default_factory=Counter)
    partial: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    breaches: tuple[str, ...] = ()

    @property
    def num_left_open(self) -> int:
        """Streams that the server had not ended when the attack's time was up."""
        return self.ends[OPEN]


Attack = Callable[[Address, Size], Awaitable[Sent]]


def total(reports: Iterable[Sent]) -> Sent:
    """Add up what the connections of one attack did."""
    whole, partial, ends, breaches = Counter[str](), Counter[str](), Counter[str](), list[str]()
    for report in reports:
        whole += report.whole
        partial += report.partial
        ends += report.ends
        breaches += report.breaches
    return Sent(whole=whole, partial=partial, ends=ends, breaches=tuple(breaches))


async def on_each(size: Size, attack_one: Callable[[], Awaitable[Sent]]) -> Sent:
    """Run the same on every connection at once."""
    return total(await asyncio.gather(*(attack_one() for _ in range(size.connections))))


async def ended(connection: RawConnection, method: str, size: Size) -> Sent:
    """Wait for the server to end every call of a connection, and report.

    A call whose connection ended under it may not have reached the server.
    """
    ends = await connection.ends(size.hold_s)
    return Sent(
        whole=Counter({method: ends.total() - ends[CLOSED]}), partial=Counter({method: ends[CLOSED]}), ends=ends
    )
