from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.engine.kv_cache import BlockPool, OutOfBlocks
from antiphon.ops.cache_geometry import blocks_for


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
