from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.service.errors import QueueFull, Unavailable
from antiphon.service.request_queue import MAX_RETRY_S, MIN_RETRY_S, QueueLimits, RequestQueue
from antiphon.service.sequence import SequenceGroup
from antiphon.service.stream import OutputStream
from tests.fakes import request_of, source_of


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Maker:
    """Builds waiting groups."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(
        self, name: str, *, length: int = 3, arrival_s: float = 0.0, deadline_s: float | None = None
    ) -> SequenceGroup:
        source = source_of(target_len=3, length=length)
        return SequenceGroup(
            request=request_of(name, source, arrival_s=arrival_s, deadline_s=deadline_s),
            stream=OutputStream(name, loop=self._loop),
            max_new_tokens=4,
            num_rows=1,
            num_self_blocks=1,
            num_cross_blocks=1,
        )


@pytest.fixture
def waiting(loop: asyncio.AbstractEventLoop) -> Maker:
    return Maker(loop)


def queue_of(max_requests: int = 4, max_source_tokens: int = 100) -> RequestQueue:
    return RequestQueue(QueueLimits(max_requests=max_requests, max_source_tokens=max_source_tokens))


def names(sequences: list[SequenceGroup]) -> list[str]:
    return [sequence.request_id for sequence in sequences]


def test_request_queue_keeps_the_order_of_arrival(waiting: Maker) -> None:
    queue = queue_of()
    for name in "cab":
        queue.put(waiting(name), 0.0)
    assert names(queue.peek(2)) == ["c", "a"]
    assert queue.remove("a") is not None
    assert names(queue.peek(9)) == ["c", "b"]
    assert len(queue) == 2


def test_request_queue_remove_returns_none_when_the_request_does_not_wait(waiting: Maker) -> None:
    queue = queue_of()
    assert queue.remove("unknown") is None
    queue.put(waiting("a"), 0.0)
    assert queue.remove("a") is not None
    assert queue.remove("a") is None


def test_request_queue_refuses_at_either_bound(waiting: Maker) -> None:
    queue = queue_of(max_requests=2)
    queue.put(waiting("a"), 0.0)
    queue.put(waiting("b"), 0.0)
    with pytest.raises(QueueFull):
        queue.put(waiting("c"), 0.0)
    queue = queue_of(max_source_tokens=10)
    queue.put(waiting("a", length=6), 0.0)
    with pytest.raises(QueueFull):
        queue.put(waiting("b", length=5), 0.0)
    queue.put(waiting("c", length=4), 0.0)
    assert queue.num_source_tokens == 10


def test_request_queue_takes_a_source_above_its_bound_when_empty(waiting: Maker) -> None:
    queue = queue_of(max_source_tokens=10)
    queue.put(waiting("long", length=30), 0.0)
    with pytest.raises(QueueFull):
        queue.put(waiting("short"), 0.0)


@pytest.mark.parametrize(("waited_s", "advice_s"), [(0.0, MIN_RETRY_S), (2.5, 2.5), (1e6, MAX_RETRY_S)])
def test_request_queue_advises_to_retry_after_its_oldest_wait(waiting: Maker, waited_s: float, advice_s: float) -> None:
    queue = queue_of(max_requests=1)
    queue.put(waiting("oldest", arrival_s=100.0), 100.0)
    with pytest.raises(QueueFull) as refusal:
        queue.put(waiting("refused"), 100.0 + waited_s)
    assert refusal.value.retry_after_s == advice_s


def test_request_queue_refuses_once_closed_and_keeps_what_waits(waiting: Maker) -> None:
    queue = queue_of()
    queue.put(waiting("a"), 0.0)
    queue.close()
    with pytest.raises(Unavailable):
        queue.put(waiting("b"), 0.0)
    assert names(queue.peek(9)) == ["a"]


@given(deadlines=st.lists(st.none() | st.integers(0, 50), max_size=30), data=st.data())
def test_request_queue_expires_exactly_those_whose_deadline_has_come(
    deadlines: list[int | None], data: st.DataObject
) -> None:
    with closing(asyncio.new_event_loop()) as loop:
        queue, make = queue_of(max_requests=99, max_source_tokens=999), Maker(loop)
        expected = {str(i): math.inf if d is None else float(d) for i, d in enumerate(deadlines)}
        for name, deadline_s in expected.items():
            queue.put(make(name, deadline_s=None if deadline_s == math.inf else deadline_s), 0.0)
        now_s = 0.0
        while now_s <= 50:
            late = [name for name, deadline_s in expected.items() if deadline_s <= now_s]
            assert names(queue.expired(now_s)) == late
            for name in late:
                del expected[name]
            assert names(queue.peek(99)) == list(expected)
            if data.draw(st.booleans()) and expected:
                name = data.draw(st.sampled_from(sorted(expected)))
                del expected[name]
                queue.remove(name)
            now_s += data.draw(st.integers(1, 20))


def test_request_queue_loses_nothing_when_many_threads_put(waiting: Maker) -> None:
    queue = queue_of(max_requests=10_000, max_source_tokens=10**6)
    sequences = [[waiting(f"{thread}-{i}") for i in range(200)] for thread in range(4)]

    def put_all(mine: list[SequenceGroup]) -> None:
        for sequence in mine:
            queue.put(sequence, 0.0)

    threads = [threading.Thread(target=put_all, args=(mine,)) for mine in sequences]
    for thread in threads:
        thread.start()
    taken: list[str] = []
    while len(taken) < 800:
        for sequence in queue.peek(50):
            assert queue.remove(sequence.request_id) is sequence
            taken.append(sequence.request_id)
    for thread in threads:
        thread.join()
    assert len(set(taken)) == 800
    assert queue.num_source_tokens == len(queue) == 0


@pytest.mark.parametrize("field", ["max_requests", "max_source_tokens"])
def test_queue_limits_name_the_field_that_is_wrong(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        QueueLimits(**{"max_requests": 1, "max_source_tokens": 1, field: 0})
