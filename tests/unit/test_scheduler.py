from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.service.kv_cache import BlockPool
from antiphon.service.scheduler import MAX_DEFERRED_STEPS, Batch, SchedulerLimits, schedule


@dataclass(frozen=True)
class Item:
    ticket: int
    source_len: int
    num_blocks: int = 1


def admitted(batch: Batch[Item]) -> set[int]:
    return {item.ticket for group in batch.encodes for item in group.sequences}


def items(*lengths: int) -> list[Item]:
    return [Item(ticket, length) for ticket, length in enumerate(lengths)]


def limits(max_num_seqs: int = 8, max_num_batched_tokens: int = 100) -> SchedulerLimits:
    return SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)


def test_scheduler_groups_sources_by_length_in_order_of_arrival() -> None:
    batch = schedule(items(5, 3, 5, 3, 9), num_running=2, num_free_blocks=50, limits=limits())
    groups = [(group.source_len, [item.ticket for item in group.sequences]) for group in batch.encodes]
    assert groups == [(5, [0, 2]), (3, [1, 3]), (9, [4])]
    assert batch.num_decode_rows == 7


def test_scheduler_admits_no_more_rows_than_allowed() -> None:
    assert admitted(schedule(items(3, 3, 3), num_running=6, num_free_blocks=50, limits=limits())) == {0, 1}
    assert admitted(schedule(items(3, 3, 3), num_running=8, num_free_blocks=50, limits=limits())) == set()


def test_scheduler_stops_at_the_token_budget() -> None:
    batch = schedule(items(40, 60, 1), num_running=0, num_free_blocks=50, limits=limits())
    assert admitted(batch) == {0, 1}


def test_scheduler_encodes_a_source_longer_than_the_budget_alone() -> None:
    assert admitted(schedule(items(500, 1), num_running=0, num_free_blocks=50, limits=limits())) == {0}
    assert admitted(schedule(items(1, 500), num_running=0, num_free_blocks=50, limits=limits())) == {0}


def test_scheduler_lets_none_overtake_one_that_waits_for_blocks() -> None:
    waiting = [Item(0, 3, 2), Item(1, 3, 9), Item(2, 3, 1)]
    assert admitted(schedule(waiting, num_running=0, num_free_blocks=10, limits=limits())) == {0}


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens"])
def test_scheduler_limits_name_the_field_that_is_wrong(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        SchedulerLimits(**{"max_num_seqs": 1, "max_num_batched_tokens": 1, field: 0})


def test_scheduler_encodes_later_sources_of_the_first_ones_length_with_it() -> None:
    waiting = items(5, 3, 9, 5, 3, 5, 5)
    batch = schedule(waiting, num_running=5, num_free_blocks=50, limits=limits())
    assert [[item.ticket for item in group.sequences] for group in batch.encodes] == [[0, 3, 5]]


def test_scheduler_takes_no_company_from_beyond_the_bound_of_overtaking() -> None:
    few = limits(max_num_seqs=2)
    lengths = [5] + [3] * few.max_overtaking + [5]
    assert admitted(schedule(items(*lengths), num_running=0, num_free_blocks=50, limits=few)) == {0, 1}
    assert admitted(schedule(items(*lengths[1:]), num_running=0, num_free_blocks=50, limits=few)) == {0, 1}
    lengths[few.max_overtaking] = 5
    batch = schedule(items(*lengths), num_running=0, num_free_blocks=50, limits=few)
    assert admitted(batch) == {0, few.max_overtaking}


def test_scheduler_waits_for_more_free_rows_while_more_wait_than_fit() -> None:
    many = limits(max_num_seqs=32)
    batch = schedule(items(3, 4, 5), num_running=30, num_free_blocks=50, limits=many)
    assert (batch.encodes, batch.num_decode_rows, batch.num_deferred) == ((), 30, 1)
    assert admitted(schedule(items(3, 4), num_running=30, num_free_blocks=50, limits=many)) == {0, 1}
    batch = schedule(items(3, 4, 5, 6, 7), num_running=28, num_free_blocks=50, limits=many)
    assert admitted(batch) == {0}  # the others wait for a run of their own that is worth it
    assert batch.num_deferred == 0


def test_scheduler_waits_for_a_few_steps_only() -> None:
    many = limits(max_num_seqs=32)
    num_deferred = 0
    for expected in range(1, MAX_DEFERRED_STEPS + 1):
        batch = schedule(items(3, 4), num_running=31, num_free_blocks=50, limits=many, num_deferred=num_deferred)
        assert (admitted(batch), batch.num_deferred) == (set(), expected)
        num_deferred = batch.num_deferred
    batch = schedule(items(3, 4), num_running=31, num_free_blocks=50, limits=many, num_deferred=num_deferred)
    assert (admitted(batch), batch.num_deferred) == ({0}, 0)


@given(
    arrivals=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 12)), min_size=1, max_size=80),
    max_num_seqs=st.integers(1, 20),
    budget=st.integers(1, 40),
    data=st.data(),
)
def test_scheduler_serves_all_within_its_bounds_under_random_ends_and_cancels(
    arrivals: list[tuple[int, int]], max_num_seqs: int, budget: int, data: st.DataObject
) -> None:
    pool = BlockPool(40, 16)
    bounds = limits(max_num_seqs, budget)
    waiting = [Item(ticket, length, blocks) for ticket, (length, blocks) in enumerate(arrivals)]
    running: dict[int, tuple[int, ...]] = {}
    num_overtaken = dict.fromkeys(range(len(arrivals)), 0)
    num_deferred = num_idle_steps = 0
    while waiting:
        batch = schedule(
            waiting[: bounds.max_overtaking],
            num_running=len(running),
            num_free_blocks=pool.num_free,
            limits=bounds,
            num_deferred=num_deferred,
        )
        tickets, num_deferred = admitted(batch), batch.num_deferred
        assert len(running) + len(tickets) == batch.num_decode_rows <= max_num_seqs
        assert sum(group.num_tokens for group in batch.encodes) <= budget or len(tickets) == 1
        assert all({item.source_len for item in group.sequences} == {group.source_len} for group in batch.encodes)
        assert not tickets or waiting[0].ticket in tickets  # none overtakes the first in line
        assert tickets or running  # something always moves: nobody starves
        assert num_deferred <= MAX_DEFERRED_STEPS
        for item in waiting:
            if item.ticket in tickets:
                running[item.ticket] = pool.allocate(item.num_blocks)
            else:
                num_overtaken[item.ticket] += sum(ticket > item.ticket for ticket in tickets)
        waiting = [item for item in waiting if item.ticket not in tickets]
        if data.draw(st.booleans()) and waiting:
            waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        num_idle_steps = 0 if tickets else num_idle_steps + 1
        must_end = num_idle_steps > MAX_DEFERRED_STEPS
        if running and (must_end or data.draw(st.booleans())):
            pool.free(running.pop(data.draw(st.sampled_from(sorted(running)))))
        assert pool.num_free + pool.num_used == pool.num_blocks
    assert max(num_overtaken.values()) <= bounds.max_overtaking
