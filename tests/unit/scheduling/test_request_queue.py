"""Queue of waiting requests: order, fairness and limits, and the refusal of requests that cannot run."""

import asyncio
import dataclasses
import itertools
import math
import threading
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.domain.errors import DeadlineExceeded, InvalidArgument, QueueFull, Unavailable
from antiphon.domain.limits import EncodeBudget, EngineLimits
from antiphon.domain.request import Priority
from antiphon.domain.sampling_params import SamplingParams
from antiphon.engine.admission import admit, limits_of
from antiphon.engine.fair_queue import INTERACTIVE_SHARE, QueueEntry, ServiceOrder
from antiphon.engine.request_queue import (
    MAX_RETRY_S,
    MIN_BUSY_S,
    MIN_DEPARTURES,
    MIN_RETRY_S,
    NUM_ANSWERS,
    AnswerPace,
    RequestQueue,
)
from antiphon.engine.sequence import SequenceGroup
from antiphon.engine.stream import OutputStream
from tests.fakes import FakeRunner, changed, limits_for, request_of, source_of


class Maker:
    """Builds waiting groups."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(
        self,
        name: str,
        *,
        length: int = 3,
        arrival_s: float = 0.0,
        deadline_s: float | None = None,
        client: str = "",
        priority: Priority = Priority.INTERACTIVE,
    ) -> SequenceGroup:
        source = source_of(target_len=3, length=length)
        request = request_of(name, source, arrival_s=arrival_s, deadline_s=deadline_s)
        return SequenceGroup(
            request=changed(request, client=client, priority=priority),
            stream=OutputStream(name, loop=self._loop),
            max_new_tokens=4,
            num_rows=1,
            num_self_blocks=1,
            num_cross_blocks=1,
        )


@pytest.fixture
def waiting(loop: asyncio.AbstractEventLoop) -> Maker:
    return Maker(loop)


def queue_of(max_requests: int = 4, max_source_tokens: int = 100, max_wait_s: float | None = None) -> RequestQueue:
    limits = EngineLimits(
        max_queued_requests=max_requests, max_queued_tokens=max_source_tokens, max_queue_time_s=max_wait_s
    )
    return RequestQueue(limits)


def fill(queue: RequestQueue, waiting: Maker, name: str, count: int, now_s: float = 0.0, **fields: Any) -> None:
    """Put a number of groups with numbers in their names."""
    for index in range(count):
        queue.put(waiting(f"{name} {index}".strip(), **fields), now_s)


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


def test_request_queue_refuses_at_either_limit(waiting: Maker) -> None:
    queue = queue_of(max_requests=2)
    queue.put(waiting("a"), 0.0)
    queue.put(waiting("b"), 0.0)
    with pytest.raises(QueueFull):
        queue.put(waiting("c"), 0.0)
    queue = queue_of(max_source_tokens=10)
    queue.put(waiting("a", length=6, client="one"), 0.0)
    with pytest.raises(QueueFull):
        queue.put(waiting("b", length=5, client="two"), 0.0)
    queue.put(waiting("c", length=4, client="two"), 0.0)
    assert queue.num_source_tokens == 10


def test_request_queue_accepts_a_source_above_its_limit_when_empty(waiting: Maker) -> None:
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


def test_request_queue_refuses_new_requests_and_keeps_waiting_ones_when_closed(waiting: Maker) -> None:
    queue = queue_of()
    queue.put(waiting("a"), 0.0)
    queue.close()
    with pytest.raises(Unavailable):
        queue.put(waiting("b"), 0.0)
    assert names(queue.peek(9)) == ["a"]


@given(deadlines=st.lists(st.none() | st.integers(0, 50), max_size=30), data=st.data())
def test_request_queue_expires_exactly_the_requests_whose_deadline_has_passed(
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
            assert sorted(names(queue.expired(now_s))) == sorted(late)
            for name in late:
                del expected[name]
            assert names(queue.peek(99)) == list(expected)
            if data.draw(st.booleans()) and expected:
                name = data.draw(st.sampled_from(sorted(expected)))
                del expected[name]
                queue.remove(name)
            now_s += data.draw(st.integers(1, 20))


def test_request_queue_loses_no_request_when_many_threads_put(waiting: Maker) -> None:
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


def drain(queue: RequestQueue, now_s: float = 0.0) -> list[str]:
    """Serve all waiting requests one by one, like the engine."""
    served = []
    while found := queue.peek(1):
        assert queue.take(found[0].request_id, now_s) is found[0]
        served.append(found[0].request_id)
    return served


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 30), st.booleans()), max_size=60),
    counts=st.lists(st.integers(1, 9), min_size=60, max_size=60),
)
def test_request_queue_serves_in_order_of_peek(arrivals: list[tuple[int, bool, int, bool]], counts: list[int]) -> None:
    """`peek` returns the order of service; requests of one client and priority keep their order."""
    with closing(asyncio.new_event_loop()) as loop:
        queue, make = queue_of(max_requests=99, max_source_tokens=9999), Maker(loop)
        served: list[str] = []
        for ticket, ((client, is_batch, length, is_busy), count) in enumerate(zip(arrivals, counts, strict=False)):
            priority = Priority.BATCH if is_batch else Priority.INTERACTIVE
            group = make(f"{client}{priority.value} {ticket:02}", length=length, client=str(client), priority=priority)
            queue.put(group, 0.0)
            if is_busy:
                shown = names(queue.peek(count))
                assert [queue.take(name, 0.0) is not None for name in shown] == [True] * len(shown)
                served += shown
        served += drain(queue)
        assert len(served) == len(arrivals)
        for line in {name.partition(" ")[0] for name in served}:
            own = [name for name in served if name.startswith(f"{line} ")]
            assert own == sorted(own)
        assert queue.num_source_tokens == len(queue) == 0


@given(lengths=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=30), min_size=2, max_size=5), data=st.data())
def test_request_queue_serves_waiting_clients_equally(lengths: list[list[int]], data: st.DataObject) -> None:
    """While two clients always have waiting requests, their served costs differ by less than one request of each."""
    with closing(asyncio.new_event_loop()) as loop:
        queue, make = queue_of(max_requests=999, max_source_tokens=99_999), Maker(loop)
        names_left = [(client, index) for client, own in enumerate(lengths) for index in range(len(own))]
        for client, index in data.draw(st.permutations(names_left)):
            queue.put(make(f"{client} {index}", length=lengths[client][index], client=str(client)), 0.0)
        served, left = [0] * len(lengths), [len(own) for own in lengths]
        largest = max(group.cost for group in queue.peek(999))
        while found := queue.peek(1):
            queue.take(found[0].request_id, 0.0)
            client = int(found[0].request.client)
            served[client] += found[0].cost
            left[client] -= 1
            backlogged = [one for one, count in enumerate(left) if count]
            assert all(abs(served[a] - served[b]) <= 2 * largest for a in backlogged for b in backlogged)


def test_request_queue_weighs_requests_by_their_cost(waiting: Maker) -> None:
    queue = queue_of(max_requests=999, max_source_tokens=9999)
    fill(queue, waiting, "long", 20, 0.0, length=30, client="long")
    fill(queue, waiting, "short", 100, 0.0, length=2, client="short")
    long, short = waiting("a", length=30).cost, waiting("b", length=2).cost
    first = names(queue.peek(60))
    num_long = sum(name.startswith("long") for name in first)
    assert abs(num_long * long - (60 - num_long) * short) <= long + short


def test_request_queue_remembers_the_served_cost_of_a_client_while_others_wait(waiting: Maker) -> None:
    queue = queue_of(max_requests=99, max_source_tokens=999)
    fill(queue, waiting, "steady", 4, 0.0, client="steady")
    queue.put(waiting("long", length=30, client="coming and going"), 0.0)
    for _ in range(2):
        queue.take(names(queue.peek(1))[0], 0.0)
    queue.put(waiting("again", length=30, client="coming and going"), 0.0)
    assert drain(queue) == ["steady 1", "steady 2", "steady 3", "again"]


def test_request_queue_serves_a_single_request_of_another_client_before_a_thousand(waiting: Maker) -> None:
    queue = queue_of(max_requests=9999, max_source_tokens=99_999)
    fill(queue, waiting, "many", 1000, 0.0, client="many")
    queue.take("many 0", 0.0)
    queue.put(waiting("single", client="single"), 0.0)
    assert "single" in names(queue.peek(2))


def test_request_queue_charges_nothing_for_cancelled_requests(waiting: Maker) -> None:
    queue = queue_of(max_requests=99, max_source_tokens=999)
    for name in ("a1", "b1", "a2", "b2", "a3"):
        queue.put(waiting(name, client=name[0]), 0.0)
    assert queue.remove("a1") is not None
    assert queue.remove("a2") is not None
    assert drain(queue) == ["a3", "b1", "b2"]


@pytest.mark.parametrize("num_interactive", [20, 200])
def test_request_queue_serves_interactive_first_and_a_share_of_batch(waiting: Maker, num_interactive: int) -> None:
    queue = queue_of(max_requests=999, max_source_tokens=9999)
    fill(queue, waiting, "batch", 30, 0.0, priority=Priority.BATCH)
    fill(queue, waiting, "interactive", num_interactive, 0.0)
    served = drain(queue)
    last = served.index(f"interactive {num_interactive - 1}")
    num_batch = sum(name.startswith("batch") for name in served[:last])
    assert served[0] == "interactive 0"
    assert num_batch == (num_interactive - 1) // INTERACTIVE_SHARE


def test_request_queue_saves_no_batch_share_from_times_without_batch_requests(waiting: Maker) -> None:
    queue = queue_of(max_requests=999, max_source_tokens=9999)
    fill(queue, waiting, "interactive", 50, 0.0)
    for index in range(40):
        queue.take(f"interactive {index}", 0.0)
    queue.put(waiting("batch", priority=Priority.BATCH), 0.0)
    assert drain(queue).index("batch") == INTERACTIVE_SHARE


def test_request_queue_reserves_room_for_other_clients(waiting: Maker) -> None:
    queue = queue_of(max_requests=100, max_source_tokens=9999)
    fill(queue, waiting, "greedy", 75, 0.0, client="greedy")
    with pytest.raises(QueueFull, match="client"):
        queue.put(waiting("greedy too", client="greedy"), 0.0)
    fill(queue, waiting, "modest", 25, 0.0, client="modest")
    assert len(queue) == 100


def test_request_queue_counts_a_client_of_both_priorities_once(waiting: Maker) -> None:
    queue = queue_of(max_requests=100, max_source_tokens=9999)
    for priority in Priority:
        queue.put(waiting(f"other {priority}", client="other", priority=priority), 0.0)
    fill(queue, waiting, "mine", 48, 0.0, client="mine")
    fill(queue, waiting, "other", 25, 0.0, client="other")
    queue.put(waiting("mine 49", client="mine"), 0.0)
    queue.put(waiting("mine 50", client="mine"), 0.0)  # half of it
    with pytest.raises(QueueFull, match="client"):
        queue.put(waiting("mine 51", client="mine"), 0.0)


def test_request_queue_reserves_source_tokens_for_other_clients(waiting: Maker) -> None:
    queue = queue_of(max_requests=100, max_source_tokens=100)
    queue.put(waiting("a", length=70, client="greedy"), 0.0)
    with pytest.raises(QueueFull, match="client"):
        queue.put(waiting("b", length=20, client="greedy"), 0.0)
    queue.put(waiting("c", length=30, client="modest"), 0.0)


def busy_queue(waiting: Maker, *, seconds_each: float, count: int = 40, **limits: float) -> tuple[RequestQueue, float]:
    """Return an empty queue that was drained at one request in `seconds_each` for long enough, and the time."""
    queue, now_s = queue_of(max_requests=999, max_source_tokens=9999, max_wait_s=limits.get("max_wait_s")), 0.0
    fill(queue, waiting, "past", count, 0.0)
    for index in range(count):
        now_s += seconds_each
        assert queue.take(f"past {index}", now_s) is not None
    return queue, now_s


def test_request_queue_refuses_by_expected_wait_and_reports_it(waiting: Maker) -> None:
    queue, now_s = busy_queue(waiting, seconds_each=0.1, max_wait_s=2.0)
    fill(queue, waiting, "", 20, now_s)
    assert queue.expected_wait_s(now_s) == pytest.approx(2.0, rel=0.05)
    queue.put(waiting("last"), now_s)  # close to the limit
    with pytest.raises(QueueFull, match="wait") as refusal:
        queue.put(waiting("refused"), now_s)
    assert refusal.value.retry_after_s == pytest.approx(2.1, rel=0.05)


def test_request_queue_refuses_a_deadline_before_the_expected_start(waiting: Maker) -> None:
    queue, now_s = busy_queue(waiting, seconds_each=0.1)
    fill(queue, waiting, "", 20, now_s)
    with pytest.raises(DeadlineExceeded):
        queue.put(waiting("hopeless", deadline_s=now_s + 1.0), now_s)
    with pytest.raises(DeadlineExceeded):
        queue.put(waiting("too close", deadline_s=now_s + 2.1), now_s)
    queue.put(waiting("with time to spare", deadline_s=now_s + 3.0), now_s)
    queue.put(waiting("other", deadline_s=now_s + 0.5, client="other"), now_s)  # it starts at once


def test_request_queue_refuses_a_deadline_before_the_expected_end_of_the_answer(waiting: Maker) -> None:
    queue, now_s = busy_queue(waiting, seconds_each=0.1)
    fill(queue, waiting, "", 5, now_s)
    queue.put(waiting("before", deadline_s=now_s + 1.2), now_s)
    for _ in range(MIN_DEPARTURES):
        queue.answered(1.0, 2)  # 0.5 s a token, so 1.5 s for three tokens
    with pytest.raises(DeadlineExceeded, match="and take 1 s"):
        queue.put(waiting("hopeless", deadline_s=now_s + 1.2), now_s)
    queue.put(waiting("patient", deadline_s=now_s + 3.0), now_s)
    empty, now_s = busy_queue(waiting, seconds_each=0.1)
    for _ in range(MIN_DEPARTURES):
        empty.answered(100.0, 1)
    empty.put(waiting("a", deadline_s=now_s + 0.1), now_s)  # an empty queue accepts every request


def test_answer_pace_follows_a_change_and_assumes_at_most_the_usual_length() -> None:
    pace = AnswerPace()
    for _ in range(MIN_DEPARTURES - 1):
        pace.answered(1.0, 10)
    assert pace.seconds(10) == 0.0
    pace.answered(1.0, 10)
    assert pace.seconds(5) == pytest.approx(0.5)
    assert pace.seconds(500) == pytest.approx(1.0)
    for _ in range(10 * NUM_ANSWERS):
        pace.answered(4.0, 20)
    assert pace.seconds(500) == pytest.approx(4.0, rel=0.01)


def test_request_queue_estimates_no_wait_without_measurements(waiting: Maker) -> None:
    fresh = queue_of(max_requests=999, max_source_tokens=9999, max_wait_s=0.001)
    fill(fresh, waiting, "", 50, 0.0, deadline_s=1e-9)
    assert fresh.expected_wait_s(0.0) is None
    too_few, now_s = busy_queue(waiting, seconds_each=MIN_BUSY_S, count=MIN_DEPARTURES, max_wait_s=0.001)
    too_short, then_s = busy_queue(waiting, seconds_each=MIN_BUSY_S / 100, max_wait_s=0.001)
    for queue, time_s in ((too_few, now_s), (too_short, then_s)):
        fill(queue, waiting, "", 50, time_s, deadline_s=time_s + 1e-9)


def test_request_queue_measures_no_rate_from_requests_that_find_it_idle(waiting: Maker) -> None:
    """Each waits alone for a slow step, which gives no rate of a queue."""
    queue = queue_of(max_requests=999, max_source_tokens=9999, max_wait_s=0.001)
    for index in range(100):
        queue.put(waiting(f"past {index}"), index * 10.0)
        queue.take(f"past {index}", index * 10.0 + 5.0)
    queue.put(waiting("first"), 1000.0)
    queue.put(waiting("second", deadline_s=1000.1), 1000.0)


def test_request_queue_accepts_any_request_when_empty_at_any_measured_rate(waiting: Maker) -> None:
    queue, now_s = busy_queue(waiting, seconds_each=10.0, max_wait_s=0.001)
    queue.put(waiting("a", deadline_s=now_s + 0.01), now_s)


def test_request_queue_expects_a_longer_wait_while_no_request_leaves(waiting: Maker) -> None:
    queue, now_s = busy_queue(waiting, seconds_each=0.1)
    fill(queue, waiting, "", 20, now_s)
    queue.take("0", now_s + 0.1)
    waits_s = [queue.expected_wait_s(now_s + later_s) or 0.0 for later_s in (0.1, 1.0, 10.0, 1000.0)]
    assert waits_s == sorted(waits_s)
    assert waits_s[-1] > 1000


def test_request_queue_serves_preempted_requests_first(waiting: Maker) -> None:
    queue = queue_of(max_requests=2)
    queue.put(waiting("a"), 0.0)
    queue.put(waiting("b"), 0.0)
    for ticket, (name, priority) in enumerate(
        [("old batch", Priority.BATCH), ("old", Priority.INTERACTIVE), ("newer", Priority.INTERACTIVE)]
    ):
        group = waiting(name, priority=priority)
        group.ticket = ticket
        queue.put_back(group)
    assert queue.num_preempted == 3
    assert names(queue.peek(9)) == ["old", "newer", "old batch", "a", "b"]
    assert queue.remove("newer") is not None
    assert drain(queue) == ["old", "old batch", "a", "b"]
    assert queue.num_preempted == len(queue) == queue.num_source_tokens == 0


def test_request_queue_counts_the_cost_of_a_preempted_request_once(waiting: Maker) -> None:
    queue, now_s = busy_queue(waiting, seconds_each=0.1)
    fill(queue, waiting, "", 20, now_s)
    before_s = queue.expected_wait_s(now_s)
    for _ in range(50):  # no other request is served meanwhile
        now_s += 0.1
        group = queue.take("0", now_s)
        assert group is not None
        queue.put_back(group)
    after_s = queue.expected_wait_s(now_s)
    assert before_s is not None
    assert after_s is not None
    assert after_s > 1.5 * before_s


def test_cost_before_an_entry_is_that_of_the_groups_served_before_it(waiting: Maker) -> None:
    order = ServiceOrder()
    for name in [*(f"a{index}" for index in range(2)), *(f"b{index}" for index in range(10))]:
        order.add(waiting(name, client=name[0]))
    last = waiting("last", client="a")
    expected = order.cost_before(QueueEntry("a", Priority.INTERACTIVE, 3, last.cost))
    order.add(last)
    served = sum(group.cost for group in itertools.takewhile(lambda group: group is not last, order.in_order()))
    assert served <= expected <= served + last.cost  # the other client may come first in the last turn


def test_request_queue_expires_a_preempted_request_once(waiting: Maker) -> None:
    queue = queue_of()
    group = waiting("a", deadline_s=5.0)
    queue.put(group, 0.0)
    queue.take("a", 1.0)
    queue.put_back(group)
    assert queue.expired(4.0) == []
    assert queue.expired(5.0) == [group]
    assert queue.expired(6.0) == []
    assert len(queue) == 0


@pytest.mark.parametrize("priority", list(Priority))
def test_queue_serves_every_priority(waiting: Maker, priority: Priority) -> None:
    queue = queue_of()
    queue.put(waiting("a", priority=priority), 0.0)
    assert names(queue.peek(1)) == ["a"]


def check(source: int, prefix: int) -> None:
    runner = FakeRunner(vocab_size=64)
    runner.facts = dataclasses.replace(runner.facts, source_vocab_size=80)
    admit(request_of("a", (source,), prefix=(prefix,)), OutputStream("a"), limits_of(runner, limits_for(runner)))


async def test_admission_names_the_longest_source_when_one_is_predicted_not_to_fit() -> None:
    runner = FakeRunner(max_source_len=32)
    budget = EncodeBudget(max_bytes=1000, predict=lambda num_tokens, longest: 100 + 50 * num_tokens)  # 18 tokens
    limits = limits_of(runner, limits_for(runner, encode_budget=budget))
    for length in (17, 18):
        admit(request_of("a", source_of(target_len=3, length=length)), OutputStream("a"), limits)
    with pytest.raises(InvalidArgument, match="source is 19 tokens long; it must be 1 to 18 tokens long"):
        admit(request_of("a", source_of(target_len=3, length=19)), OutputStream("a"), limits)


async def test_admission_accepts_every_id_of_either_vocabulary() -> None:
    check(79, 63)


@pytest.mark.parametrize(("source", "prefix", "field", "highest"), [(80, 0, "source", 79), (79, 64, "prefix", 63)])
async def test_admission_names_the_vocabulary_of_a_wrong_id(source: int, prefix: int, field: str, highest: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{field} .*from 0 to {highest}"):
        check(source, prefix)


async def test_cost_counts_every_row_at_its_requested_length() -> None:
    def cost(**controls: object) -> int:
        params = SamplingParams(max_new_tokens=24, **controls)  # type: ignore[arg-type]
        runner = FakeRunner()
        made = request_of("a", source_of(target_len=3, length=5), params=params)
        return admit(made, OutputStream("a"), limits_of(runner, limits_for(runner))).cost

    assert cost() == 5 + 5
    assert cost(min_new_tokens=12) == 5 + 12
    assert cost(ignore_eos=True) == 5 + 24
    assert cost(ignore_eos=True, temperature=1.0, num_return_sequences=8) == 5 + 8 * 24
    assert cost(ignore_eos=True, temperature=1.0, num_return_sequences=8, top_p=0.9) == 5 + 8 * 36
