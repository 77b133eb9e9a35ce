"""The terms of every attack: its size, and its report of what it sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from tests.abuse.calls import ACCOUNTED_SERVICES
from tests.abuse.raw_connection import OPEN, Address


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Bounds of an attack.

    connections: at once. calls: on each connection; of floods, frames. hold_s: the longest time that an attack waits
    for the server to end what it holds open. interval_s: between the bytes of slow senders and slow readers.
    """

    connections: int
    calls: int
    hold_s: float
    interval_s: float = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """What an attack did.

    whole: calls by method that the server must have counted. partial: calls that it may have seen or not, because they
    were reset, or their connection ended, before it answered. ends: how streams or connections ended, by number.
    """

    whole: Counter[str] = field(default_factory=Counter)
    partial: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def num_left_open(self) -> int:
        """Streams that the server had not ended when the attack's time was up."""
        return self.ends[OPEN]


Attack = Callable[[Address, Size], Awaitable[Sent]]


def is_accounted(method: str) -> bool:
    """Return whether the metrics count every call of this method by name."""
    return method.rpartition("/")[0] in ACCOUNTED_SERVICES


def total(reports: Iterable[Sent]) -> Sent:
    """Add up what the connections of one attack did."""
    whole, partial, ends = Counter[str](), Counter[str](), Counter[str]()
    for report in reports:
        whole += report.whole
        partial += report.partial
        ends += report.ends
    return Sent(whole=whole, partial=partial, ends=ends)
