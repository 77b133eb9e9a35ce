"""Calls that wait for their clients: each has a time limit, and the largest holder makes room for the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from antiphon.domain.errors import AntiphonError, RequestTimeout, SlowReader, TooManyRpcs
from antiphon.rpc.client_waits import ClientWaits, Stage, Wait
from tests.waits import client_waits


class Clients:
    """Begins waits, and records which of them were ended, with which error."""

    def __init__(self, waits: ClientWaits) -> None:
        self._waits = waits
        self.given_up: list[tuple[str, AntiphonError]] = []
        self.second = asyncio.Event()

    def begin(
        self,
        stage: Stage,
        name: str,
        *,
        caller: str = "",
        num_bytes: int = 0,
        backlog: Callable[[], int] | None = None,
    ) -> Wait:
        """Begin a wait. name: `connection/number` of the call."""
        connection = name.partition("/")[0]
        wait = Wait(stage, caller or "host", connection, lambda error: self._note(name, error), num_bytes, backlog)
        self._waits.begin(wait)
        return wait

    def _note(self, name: str, error: AntiphonError) -> None:
        self.given_up.append((name, error))
        if len(self.given_up) == 2:
            self.second.set()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.given_up]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(clock: Clock) -> Callable[..., tuple[ClientWaits, Clients]]:
    def make(**limits: int) -> tuple[ClientWaits, Clients]:
        waits = client_waits(clock=clock, **limits)  # type: ignore[arg-type]
        return waits, Clients(waits)

    return make


@pytest.mark.parametrize(
    ("stage", "kind", "said"),
    [(Stage.REQUEST, RequestTimeout, "no complete request came within 0.05 s"), (Stage.ANSWER, SlowReader, "0.05 s")],
)
async def test_waits_end_oldest_first_when_their_time_is_over(
    stage: Stage, kind: type[AntiphonError], said: str
) -> None:
    given_up: list[tuple[Stage, str]] = []
    clients = Clients(client_waits(request_timeout_s=0.05, answer_timeout_s=0.05, given_up=given_up))
    clients.begin(stage, "a/1")
    clients.begin(stage, "a/2")
    async with asyncio.timeout(60):
        await clients.second.wait()
    assert clients.names == ["a/1", "a/2"]
    assert all(isinstance(error, kind) and said in str(error) for _, error in clients.given_up)
    assert given_up == [(stage, "timeout")] * 2


async def test_wait_that_has_ended_is_not_given_up(make: Callable[..., tuple[ClientWaits, Clients]]) -> None:
    waits, clients = make(max_unsent_bytes=100)
    ended = clients.begin(Stage.ANSWER, "a/1", num_bytes=60)
    assert waits.end(ended)
    assert not waits.end(ended)
    clients.begin(Stage.ANSWER, "b/1", num_bytes=60)
    assert waits.unsent_bytes == 60
    assert clients.names == []


async def test_room_is_made_by_the_connection_with_the_most_waiting_calls(
    make: Callable[..., tuple[ClientWaits, Clients]], clock: Clock
) -> None:
    waits, clients = make()
    for name in ("busy/1", "calm/1", "busy/2", "busy/3"):
        clients.begin(Stage.ANSWER, name)
    clock.now_s += 2
    assert waits.make_room(32)
    assert clients.names == ["busy/1", "busy/2"]
    assert all(isinstance(error, TooManyRpcs) for _, error in clients.given_up)
    assert waits.num_waiting(Stage.ANSWER) == 2


async def test_room_is_made_by_the_caller_with_the_most_waiting_calls_over_all_connections(
    make: Callable[..., tuple[ClientWaits, Clients]], clock: Clock
) -> None:
    """A caller with many connections of one call each must not push out one with two calls on one connection."""
    waits, clients = make()
    for number in range(3):
        clients.begin(Stage.REQUEST, f"many{number}/1", caller="many")
    for number in range(2):
        clients.begin(Stage.REQUEST, f"few/{number}", caller="few")
    clock.now_s += 2
    assert waits.make_room(16)
    assert clients.names == ["many0/1"]


async def test_no_room_is_made_by_calls_that_have_only_begun_to_wait(
    make: Callable[..., tuple[ClientWaits, Clients]], clock: Clock
) -> None:
    waits, clients = make()
    clients.begin(Stage.OPEN, "a/1")
    clock.now_s += 0.5
    assert not waits.make_room(1)
    assert clients.names == []


async def test_number_of_incomplete_requests_is_bounded(
    make: Callable[..., tuple[ClientWaits, Clients]], clock: Clock
) -> None:
    waits, clients = make(max_requests=2)
    clients.begin(Stage.REQUEST, "a/1")
    clients.begin(Stage.REQUEST, "a/2")
    clock.now_s += 2
    clients.begin(Stage.REQUEST, "b/1")
    assert clients.names == ["a/1"]
    assert waits.num_waiting(Stage.REQUEST) == 2


async def test_unread_bytes_are_bounded_and_the_largest_holder_loses_its_oldest_answer(
    make: Callable[..., tuple[ClientWaits, Clients]],
) -> None:
    waits, clients = make(max_unsent_bytes=160)
    clients.begin(Stage.ANSWER, "calm/1", num_bytes=50)
    clients.begin(Stage.ANSWER, "busy/1", num_bytes=60)
    clients.begin(Stage.ANSWER, "busy/2", num_bytes=50)
    assert clients.names == []
    clients.begin(Stage.ANSWER, "busy/3", num_bytes=10)
    assert clients.names == ["busy/1"]
    assert waits.unsent_bytes == 110


async def test_single_answer_may_be_larger_than_the_bound(make: Callable[..., tuple[ClientWaits, Clients]]) -> None:
    waits, clients = make(max_unsent_bytes=100)
    clients.begin(Stage.ANSWER, "a/1", num_bytes=500)
    assert clients.names == []
    clients.begin(Stage.ANSWER, "a/2", num_bytes=10)
    assert clients.names == ["a/1"]
    assert waits.unsent_bytes == 10


async def test_bytes_behind_unread_answers_count_while_they_grow(
    make: Callable[..., tuple[ClientWaits, Clients]],
) -> None:
    """Regression: the limit counted the message alone, and 500 streams kept 400 MB behind theirs."""
    waits, clients = make(max_unsent_bytes=1000)
    backlogs = {"a/1": 0, "b/1": 0, "b/2": 0}
    for name in backlogs:
        caller = name.partition("/")[0]
        clients.begin(Stage.ANSWER, name, caller=caller, num_bytes=10, backlog=partial(backlogs.__getitem__, name))
    backlogs |= {"a/1": 300, "b/1": 200, "b/2": 250}
    await until(lambda: waits.unsent_bytes == 780)
    assert clients.names == []
    backlogs |= {"a/1": 450, "b/1": 300}
    await until(lambda: bool(clients.names))
    assert clients.names == ["b/1"]
    assert "more than 500 bytes" in str(clients.given_up[0][1])
    assert waits.unsent_bytes == 720


async def test_caller_may_have_half_of_the_bytes(make: Callable[..., tuple[ClientWaits, Clients]]) -> None:
    waits, clients = make(max_unsent_bytes=1000)
    clients.begin(Stage.ANSWER, "a/1", caller="a", num_bytes=400)
    for number in range(4):
        clients.begin(Stage.ANSWER, f"b/{number}", caller="b", num_bytes=140)
    await until(lambda: bool(clients.names))
    assert clients.names == ["b/0"]
    assert waits.unsent_bytes == 820


async def test_incomplete_requests_of_a_flood_are_ended_at_any_age(
    make: Callable[..., tuple[ClientWaits, Clients]],
) -> None:
    """Regression: 4,000 messages without their ends took 800 MB within a second."""
    waits, clients = make(max_requests=16)
    for number in range(24):
        clients.begin(Stage.REQUEST, f"a/{number}")
    assert clients.names == []
    clients.begin(Stage.REQUEST, "b/1")
    assert clients.names == [f"a/{number}" for number in range(10)]
    assert waits.num_waiting(Stage.REQUEST) == 15


async def test_incomplete_requests_are_ended_once_they_are_old(
    make: Callable[..., tuple[ClientWaits, Clients]], clock: Clock
) -> None:
    """Regression: they were looked at when another request began, which may be never."""
    waits, clients = make(max_requests=2)
    for number in range(3):
        clients.begin(Stage.REQUEST, f"a/{number}")
    clock.now_s += 2
    await until(lambda: bool(clients.names))
    assert clients.names == ["a/0"]
    assert waits.num_waiting(Stage.REQUEST) == 2


async def until(condition: Callable[[], bool]) -> None:
    """Poll a condition that becomes true at the next look at the waiting calls."""
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)
