"""A background writer writes every item in order and never blocks its caller."""

from __future__ import annotations

import threading

from antiphon.observability.background_writer import BackgroundWriter

PATIENCE_S = 60


class Slow:
    """Stores the written batches. Blocks in the first call until `go` is set."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.dropped = 0
        self.began, self.go = threading.Event(), threading.Event()

    def write(self, batch: list[int]) -> None:
        self.began.set()
        assert self.go.wait(PATIENCE_S)
        self.batches.append(batch)

    def drop(self) -> None:
        self.dropped += 1

    def writer(self, **settings: int) -> BackgroundWriter[int]:
        return BackgroundWriter("test", self.write, on_drop=self.drop, gather_s=0.0, **settings)


def test_background_writer_writes_every_item_in_order_in_batches_of_bounded_size() -> None:
    slow = Slow()
    writer = slow.writer(max_batch=7)
    slow.go.set()
    for item in range(100):
        writer.put(item)
    assert writer.close(PATIENCE_S)
    assert [item for batch in slow.batches for item in batch] == list(range(100))
    assert max(map(len, slow.batches)) <= 7
    assert slow.dropped == 0


def test_background_writer_drops_and_counts_items_when_the_queue_is_full() -> None:
    slow = Slow()
    writer = slow.writer(max_waiting=5)
    writer.put(-1)
    assert slow.began.wait(PATIENCE_S)  # the thread is blocked in the write of the first item
    for item in range(8):
        writer.put(item)
    assert slow.dropped == 3
    slow.go.set()
    assert writer.close(PATIENCE_S)
    assert [item for batch in slow.batches for item in batch] == [-1, 0, 1, 2, 3, 4]


def test_background_writer_continues_when_a_write_failed() -> None:
    written: list[int] = []
    both = threading.Event()

    def write(batch: list[int]) -> None:
        written.extend(batch)
        if 2 in written:
            both.set()
        raise RuntimeError("broken")

    writer: BackgroundWriter[int] = BackgroundWriter("test", write, on_drop=lambda: None, gather_s=0.0, max_batch=1)
    writer.put(1)
    writer.put(2)
    assert both.wait(PATIENCE_S)
    assert writer.close(PATIENCE_S)
    assert written == [1, 2]


def test_background_writer_close_returns_when_a_write_hangs() -> None:
    slow = Slow()
    writer = slow.writer()
    writer.put(1)
    assert slow.began.wait(PATIENCE_S)
    assert not writer.close(0.0)
    slow.go.set()
    assert writer.close(PATIENCE_S)
