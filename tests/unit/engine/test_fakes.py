"""The fake runner: its answers, and its errors when it is misused."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from antiphon.runtime.runner import DecodeBatch
from tests.batches import SampleSettings, batch_of, sampling_of
from tests.fakes import BOS_ID, EOS_ID, MEMORY_WIDTH, FakeRunner

SOURCE = (9, 7, 8, EOS_ID)
Fed = Sequence[Sequence[int]]


@pytest.fixture
def runner() -> FakeRunner:
    """Build a runner with one source in blocks 0 and 1."""
    runner = FakeRunner(block_size=3, num_blocks=40, reads_history=True)
    runner.encode([SOURCE], [(0, 1)])
    return runner


def batch(fed: Fed, past_lens: Sequence[int], self_tables: Fed, cross_tables: Fed = ((0, 1),)) -> DecodeBatch:
    """Build a batch with rows of the source."""
    num_rows = len(fed)
    tables = (self_tables, [*cross_tables] * (num_rows // len(cross_tables)))
    return batch_of(fed, past_lens, [len(SOURCE)] * num_rows, tables=tables)


def test_fake_runner_reads_the_history_from_the_blocks(runner: FakeRunner) -> None:
    runner.decode(batch([[BOS_ID, 5], [BOS_ID, 6]], [0, 0], [(10, 11), (20, 21)]))
    drawn = runner.decode(batch([[4], [4]], [2, 2], [(20, 21), (10, 11)]))  # rows in another order
    expected = [runner.logits_after(SOURCE, (BOS_ID, token_id, 4)).argmax() for token_id in (6, 5)]
    assert drawn.token_ids.tolist() == expected
    assert len(set(expected)) == 2


def test_fake_runner_chooses_after_any_token(runner: FakeRunner) -> None:
    sampling = sampling_of([2, 0, 2], [SampleSettings(), SampleSettings(num_logprobs=2), SampleSettings(forced_id=5)])
    held = batch_of([[BOS_ID, 5, 6]], [0], [len(SOURCE)], tables=([(10,)], [(0, 1)]), sampling=sampling)
    drawn = runner.decode(held)
    assert drawn.token_ids[0] == runner.logits_after(SOURCE, (BOS_ID, 5, 6)).argmax()
    assert drawn.top_ids[1].tolist() == np.argsort(-runner.logits_after(SOURCE, (BOS_ID,)))[:2].tolist()
    assert drawn.token_ids[2] == 5


def test_fake_runner_lets_rows_share_blocks_that_neither_writes(runner: FakeRunner) -> None:
    runner.decode(batch([[BOS_ID, 5, 6, 7]], [0], [(10, 11)]))
    runner.copy_blocks(np.array([11], np.int32), np.array([12], np.int32))
    drawn = runner.decode(batch([[8], [9]], [4, 4], [(10, 11), (10, 12)]))
    for row, token_id in enumerate((8, 9)):
        assert drawn.token_ids[row] == runner.logits_after(SOURCE, (BOS_ID, 5, 6, 7, token_id)).argmax()


def test_fake_runner_computes_states_from_the_tokens_alone(runner: FakeRunner) -> None:
    report = runner.encode([(3, EOS_ID), SOURCE], [(5,), (6, 7)], keep_memory=True)
    assert report.memory is not None
    assert report.memory.shape == (6, MEMORY_WIDTH)
    np.testing.assert_array_equal(report.memory[2:], runner.memory(SOURCE))
    np.testing.assert_array_equal(report.memory[1], report.memory[5])


def stale(runner: FakeRunner) -> None:
    """Write a block whose former owner had another source."""
    runner.encode([(3, 4, EOS_ID)], [(2,)])
    tables = ([(30,)], [(2,)])
    runner.decode(batch_of([[BOS_ID, 5]], [0], [3], tables=tables))
    runner.decode(batch([[4]], [2], [(30,)]))


MISUSES: dict[str, tuple[str, Callable[[FakeRunner], object]]] = {
    "stale": ("does not hold position 0", stale),
    "gap": ("does not hold position 1", lambda runner: runner.decode(batch([[4]], [3], [(10, 11)]))),
    "foreign_source": ("does not hold position 0", lambda runner: runner.decode(batch([[1]], [0], [(10,)], [(3, 4)]))),
    "part_of_a_source": (
        "does not hold position 0",
        lambda runner: runner.decode(batch_of([[1]], [0], [3], tables=([(10,)], [(0,)]))),
    ),
    "two_writers": ("written by one row", lambda runner: runner.decode(batch([[1], [1]], [0, 0], [(10,), (10,)]))),
    "a_source_overwritten": ("written by one row", lambda runner: runner.decode(batch([[1]], [0], [(0,)]))),
    "no_begin_token": ("is fed 5 after 0 tokens", lambda runner: runner.decode(batch([[5]], [0], [(10,)]))),
    "two_begin_tokens": ("is fed 1 after 1 tokens", lambda runner: runner.decode(batch([[1, 1]], [0], [(10,)]))),
    "no_such_block": ("block 40 does not exist", lambda runner: runner.decode(batch([[1]], [0], [(40,)]))),
    "copy_onto_itself": (
        "both source and target",
        lambda runner: runner.copy_blocks(np.array([3, 4], np.int32), np.array([4, 5], np.int32)),
    ),
    "copied_twice": (
        "copied to",
        lambda runner: runner.copy_blocks(np.array([3, 4], np.int32), np.array([5, 5], np.int32)),
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_fake_runner_raises_when_it_is_misused(runner: FakeRunner, name: str) -> None:
    complaint, misuse = MISUSES[name]
    runner.decode(batch([[BOS_ID]], [0], [(10, 11)]))
    with pytest.raises(AssertionError, match=complaint):
        misuse(runner)
