"""Interface of every attack: its size, and its report of the sent calls and frames."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field

from h2.settings import SettingCodes

from tests.abuse.calls import Call
from tests.abuse.raw_connection import CLOSED, OPEN, Address, RawConnection


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Size of an attack.

    connections: number of concurrent connections. calls: open calls on each connection. frames: frames of a flood, or
    reset calls, on each connection. storm: connections opened one after the other, by each of `connections`, or in
    total if they are kept open. hold_s: maximum time that an attack waits for the server to end calls and connections.
    unread_s: time for which a socket is not read. interval_s: between the bytes of slow senders and slow readers.
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
    """Report of one attack.

    whole: calls by method that the server must have counted. partial: calls that may not have reached the server,
    because they were reset, or their connection ended, before an answer. ends: number of streams or connections by
    their end. breaches: messages about forbidden behaviour of the server.
    """

    whole: Counter[str] = field(default_factory=Counter)
    partial: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    breaches: tuple[str, ...] = ()

    @property
    def num_left_open(self) -> int:
        """Number of streams that the server had not ended at the end of the attack."""
        return self.ends[OPEN]


Attack = Callable[[Address, Size], Awaitable[Sent]]


def total(reports: Iterable[Sent]) -> Sent:
    whole, partial, ends, breaches = Counter[str](), Counter[str](), Counter[str](), list[str]()
    for report in reports:
        whole += report.whole
        partial += report.partial
        ends += report.ends
        breaches += report.breaches
    return Sent(whole=whole, partial=partial, ends=ends, breaches=tuple(breaches))


Play = Callable[[RawConnection, Size], Awaitable[Sent]]


async def on_each(size: Size, attack_one: Callable[[], Awaitable[Sent]]) -> Sent:
    """Run a function concurrently for every connection."""
    return total(await asyncio.gather(*(attack_one() for _ in range(size.connections))))


def played(play: Play, settings: Mapping[SettingCodes, int] | None = None, **options: bool) -> Attack:
    """Return an attack that plays on each of its connections. options: of RawConnection.open."""

    async def attack(address: Address, size: Size) -> Sent:
        async def one() -> Sent:
            async with await RawConnection.open(address, settings, **options) as connection:
                return await play(connection, size)

        return await on_each(size, one)

    return attack


async def ended(connection: RawConnection, method: str, size: Size, call: Call | None = None) -> Sent:
    """Wait for the server to end every call of a connection, and report.

    A call may not have reached the server if its connection ended before. call: what was sent, if it has requests that
    are counted too, of which the server may have read some.
    """
    ends = await connection.ends(size.hold_s)
    partial = Counter({method: ends[CLOSED]})
    if call is not None:
        partial += call.requests_of(ends.total())
    return Sent(whole=Counter({method: ends.total() - ends[CLOSED]}), partial=partial, ends=ends)
