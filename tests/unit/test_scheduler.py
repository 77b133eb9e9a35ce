from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.service.kv_cache import BlockPool
from antiphon.service.scheduler import Batch, SchedulerLimits, schedule


@dataclass(frozen=True)
class Item:
    name: int
    source_len: int
    num_blocks: int = 1


def admitted(batch: Batch[Item]) -> set[int]:
    return {item.name for group in batch.encodes for item in group.sequences}


def items(*lengths: int) -> list[Item]:
    return [Item(name, length) for name, length in enumerate(lengths)]


def limits(max_num_seqs: int = 8, max_num_batched_tokens: int = 100) -> SchedulerLimits:
    return SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)


def test_scheduler_groups_sources_by_length_in_order_of_arrival() -> None:
    batch = schedule(items(5, 3, 5, 3, 9), num_running=2, num_free_blocks=50, limits=limits())
    groups = [(group.source_len, [item.name for item in group.sequences]) for group in batch.encodes]
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


@given(
    arrivals=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=60),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 40),
    data=st.data(),
)
def test_scheduler_serves_all_in_order_under_random_ends_and_cancels(
    arrivals: list[tuple[int, int]], max_num_seqs: int, budget: int, data: st.DataObject
) -> None:
    pool = BlockPool(12, 16)
    waiting = [Item(name, length, blocks) for name, (length, blocks) in enumerate(arrivals)]
    running: dict[int, tuple[int, ...]] = {}
    last_admitted = -1
    num_idle_steps = 0
    while waiting:
        batch = schedule(
            waiting,
            num_running=len(running),
            num_free_blocks=pool.num_free,
            limits=limits(max_num_seqs, budget),
        )
        names = admitted(batch)
        assert names == {item.name for item in waiting[: len(names)]}
        assert len(running) + len(names) == batch.num_decode_rows <= max_num_seqs
        num_tokens = sum(group.num_tokens for group in batch.encodes)
        assert num_tokens <= budget or len(names) == 1
        assert names or running  # something always moves: nobody starves
        for item in waiting[: len(names)]:
            assert item.name > last_admitted
            last_admitted = item.name
            running[item.name] = pool.allocate(item.num_blocks)
        waiting = waiting[len(names) :]
        if data.draw(st.booleans()) and waiting:
            waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        num_idle_steps = 0 if names else num_idle_steps + 1
        must_end = num_idle_steps > 3
        if running and (must_end or data.draw(st.booleans())):
            pool.free(running.pop(data.draw(st.sampled_from(sorted(running)))))
        assert pool.num_free + pool.num_used == pool.num_blocks
