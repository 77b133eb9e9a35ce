from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.domain.limits import EncodeBudget, EngineLimits
from antiphon.engine.kv_cache import BlockPool, OutOfBlocks
from antiphon.engine.scheduler import MAX_DEFERRED_STEPS, Batch, schedule
from antiphon.ops.cache_geometry import blocks_for


@dataclass(frozen=True)
class Item:
    ticket: int
    num_prefill_tokens: int
    num_blocks: int = 1
    num_rows: int = 1
    can_start_with_one: bool = False

    @property
    def num_first_rows(self) -> int:
        return min(1, self.num_rows) if self.can_start_with_one else self.num_rows

    @property
    def source_len(self) -> int:
        return self.num_prefill_tokens


def admitted(batch: Batch[Item]) -> list[int]:
    return [item.ticket for item in batch.joining]


def items(*lengths: int) -> list[Item]:
    return [Item(ticket, length) for ticket, length in enumerate(lengths)]


def limits(max_num_seqs: int = 8, max_num_batched_tokens: int = 100) -> EngineLimits:
    return EngineLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)


@pytest.mark.parametrize(
    ("lengths", "num_running", "expected"),
    [
        ((5, 3, 5, 3, 9), 2, [0, 1, 2, 3, 4]),  # in order of arrival
        ((3, 3, 3), 6, [0, 1]),  # up to the rows
        ((3, 3, 3), 8, []),
        ((40, 60, 1), 0, [0, 1]),  # up to the token budget
        ((500, 1), 0, [0]),  # alone, if longer than the budget
        ((1, 500), 0, [0]),
    ],
)
def test_scheduler_admits_in_order_up_to_rows_and_token_budget(
    lengths: tuple[int, ...], num_running: int, expected: list[int]
) -> None:
    batch = schedule(items(*lengths), num_running=num_running, num_free_blocks=50, limits=limits())
    assert admitted(batch) == expected


def test_scheduler_lets_no_request_overtake_one_that_waits_for_blocks() -> None:
    waiting = [Item(0, 3, 2), Item(1, 3, 9), Item(2, 3, 1)]
    assert admitted(schedule(waiting, num_running=0, num_free_blocks=10, limits=limits())) == [0]


def test_scheduler_admits_all_rows_of_a_request_or_none() -> None:
    waiting = [Item(0, 3, num_rows=4), Item(1, 3, num_rows=0), Item(2, 3, num_rows=3), Item(3, 3)]
    assert admitted(schedule(waiting, num_running=2, num_free_blocks=50, limits=limits())) == [0, 1]
    assert admitted(schedule(waiting, num_running=0, num_free_blocks=50, limits=limits())) == [0, 1, 2, 3]
    assert admitted(schedule(waiting[2:], num_running=6, num_free_blocks=50, limits=limits())) == []


def quadratic(max_bytes: int) -> EncodeBudget:
    """Return the workspace of a graph that pads every source to the longest and stores the scores."""
    return EncodeBudget(max_bytes=max_bytes, predict=lambda num_tokens, longest: 100 + num_tokens * (2 + longest))


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), max_bytes=st.integers(0, 4000))
def test_scheduler_encodes_together_only_sources_that_are_predicted_to_fit(lengths: list[int], max_bytes: int) -> None:
    budget = quadratic(max_bytes)
    bounds = EngineLimits(max_num_seqs=64, max_num_batched_tokens=10_000, encode_budget=budget)
    taken = len(schedule(items(*lengths), num_running=0, num_free_blocks=99, limits=bounds).joining)
    assert taken >= 1  # admission accepted it, so it runs alone
    assert taken == 1 or budget.predict(sum(lengths[:taken]), max(lengths[:taken])) <= max_bytes
    if taken < len(lengths):
        assert budget.predict(sum(lengths[: taken + 1]), max(lengths[: taken + 1])) > max_bytes


@given(max_bytes=st.integers(0, 4000), longest=st.integers(1, 80))
def test_encode_budget_computes_its_longest_source(max_bytes: int, longest: int) -> None:
    budget = quadratic(max_bytes)
    fitting = [length for length in range(1, longest + 1) if budget.fits(length, length)]
    assert budget.longest_source(longest) == len(fitting)


def test_scheduler_fills_free_rows_at_once_when_all_that_wait_fit() -> None:
    many = limits(max_num_seqs=32)
    assert admitted(schedule(items(3), num_running=31, num_free_blocks=50, limits=many)) == [0]


def test_scheduler_waits_for_a_few_steps_only() -> None:
    many = limits(max_num_seqs=32)
    num_deferred = 0
    for expected in range(1, MAX_DEFERRED_STEPS + 1):
        batch = schedule(items(3, 4), num_running=31, num_free_blocks=50, limits=many, num_deferred=num_deferred)
        assert (admitted(batch), batch.num_deferred) == ([], expected)
        num_deferred = batch.num_deferred
    batch = schedule(items(3, 4), num_running=31, num_free_blocks=50, limits=many, num_deferred=num_deferred)
    assert (admitted(batch), batch.num_deferred) == ([0], 0)


@given(
    arrivals=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=80),
    max_num_seqs=st.integers(4, 20),
    budget=st.integers(1, 40),
    data=st.data(),
)
def test_scheduler_serves_all_in_order_within_its_bounds_under_random_ends_and_cancels(
    arrivals: list[tuple[int, int, int]], max_num_seqs: int, budget: int, data: st.DataObject
) -> None:
    pool = BlockPool(40, 16)
    bounds = limits(max_num_seqs, budget)
    waiting = [Item(ticket, *sizes) for ticket, sizes in enumerate(arrivals)]
    running: dict[Item, tuple[int, ...]] = {}
    num_deferred = num_idle_steps = 0
    while waiting:
        num_rows = sum(item.num_rows for item in running)
        batch = schedule(
            waiting[: 1 + max_num_seqs - num_rows],
            num_running=num_rows,
            num_free_blocks=pool.num_free,
            limits=bounds,
            num_deferred=num_deferred,
        )
        joining, num_deferred = batch.joining, batch.num_deferred
        assert list(joining) == waiting[: len(joining)]  # no sequence overtakes another
        assert num_rows + sum(item.num_rows for item in joining) <= max_num_seqs
        assert sum(item.num_prefill_tokens for item in joining) <= budget or len(joining) == 1
        assert joining or running  # some sequence always progresses: none starves
        assert num_deferred <= MAX_DEFERRED_STEPS
        running.update((item, pool.allocate(item.num_blocks)) for item in joining)
        waiting = waiting[len(joining) :]
        if data.draw(st.booleans()) and waiting:
            waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
        num_idle_steps = 0 if joining else num_idle_steps + 1
        must_end = num_idle_steps > MAX_DEFERRED_STEPS
        if running and (must_end or data.draw(st.booleans())):
            pool.free(running.pop(data.draw(st.sampled_from(list(running)))))
        assert pool.num_free + pool.num_used == pool.num_blocks


@given(num_tokens=st.integers(0, 10_000), block_size=st.integers(1, 64))
def test_blocks_for_returns_the_least_number_that_holds_the_tokens(num_tokens: int, block_size: int) -> None:
    num_blocks = blocks_for(num_tokens, block_size)
    assert num_blocks * block_size >= num_tokens
    assert num_blocks == 0 or (num_blocks - 1) * block_size < num_tokens


@given(total=st.integers(1, 40), sizes=st.lists(st.integers(0, 12), max_size=40), data=st.data())
def test_block_pool_allocates_each_block_once_and_loses_none(total: int, sizes: list[int], data: st.DataObject) -> None:
    pool = BlockPool(total, 16)
    lent: list[tuple[int, ...]] = []
    for size in sizes:
        if data.draw(st.booleans()) and lent:
            pool.free(lent.pop(data.draw(st.integers(0, len(lent) - 1))))
        fits = pool.can_allocate(size)
        assert fits == (size <= pool.num_free)
        if fits:
            lent.append(pool.allocate(size))
        else:
            with pytest.raises(OutOfBlocks):
                pool.allocate(size)
        blocks = [block for table in lent for block in table]
        assert len(set(blocks)) == len(blocks) == pool.num_used
        assert pool.num_free + pool.num_used == pool.num_blocks == total
        assert all(0 <= block < total for block in blocks)


def test_block_pool_refuses_a_block_freed_twice_or_foreign_and_changes_nothing() -> None:
    pool = BlockPool(8, 16)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.free(first)
    for wrong in (first, (*second, first[0]), (8,), (-1,), (second[0], second[0])):
        with pytest.raises(ValueError, match="block"):
            pool.free(wrong)
        assert pool.num_used == 3
    pool.free(second)
    assert pool.num_free == 8


@pytest.mark.parametrize(("num_blocks", "block_size", "field"), [(-1, 16, "num_blocks"), (4, 0, "block_size")])
def test_block_pool_names_the_size_that_is_wrong(num_blocks: int, block_size: int, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        BlockPool(num_blocks, block_size)
