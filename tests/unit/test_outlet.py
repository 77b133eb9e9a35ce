"""What an outlet carries arrives in order, whole, and never holds up whoever hands it over."""

from __future__ import annotations

import threading

from antiphon.service.observability.outlet import Outlet

PATIENCE_S = 60


class Slow:
    """Takes batches, the first only once it is let go."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.dropped = 0
        self.began, self.go = threading.Event(), threading.Event()

    def take(self, batch: list[int]) -> None:
        self.began.set()
        assert self.go.wait(PATIENCE_S)
        self.batches.append(batch)

    def drop(self) -> None:
        self.dropped += 1

    def outlet(self, **settings: int) -> Outlet[int]:
        return Outlet("test", self.take, on_drop=self.drop, gather_s=0.0, **settings)


def test_outlet_hands_on_everything_in_order_and_in_batches_of_the_size_asked() -> None:
    slow = Slow()
    outlet = slow.outlet(max_batch=7)
    slow.go.set()
    for item in range(100):
        outlet.put(item)
    assert outlet.close(PATIENCE_S)
    assert [item for batch in slow.batches for item in batch] == list(range(100))
    assert max(map(len, slow.batches)) <= 7
    assert slow.dropped == 0


def test_outlet_drops_and_counts_what_its_taker_cannot_keep_up_with() -> None:
    slow = Slow()
    outlet = slow.outlet(max_waiting=5)
    outlet.put(-1)
    assert slow.began.wait(PATIENCE_S)  # the thread holds the first, and takes no more
    for item in range(8):
        outlet.put(item)
    assert slow.dropped == 3
    slow.go.set()
    assert outlet.close(PATIENCE_S)
    assert [item for batch in slow.batches for item in batch] == [-1, 0, 1, 2, 3, 4]


def test_outlet_goes_on_after_its_taker_failed() -> None:
    taken: list[int] = []
    both = threading.Event()

    def take(batch: list[int]) -> None:
        taken.extend(batch)
        if 2 in taken:
            both.set()
        raise RuntimeError("broken")

    outlet: Outlet[int] = Outlet("test", take, on_drop=lambda: None, gather_s=0.0, max_batch=1)
    outlet.put(1)
    outlet.put(2)
    assert both.wait(PATIENCE_S)
    assert outlet.close(PATIENCE_S)
    assert taken == [1, 2]


def test_outlet_that_is_stuck_lets_go_of_whoever_closes_it() -> None:
    slow = Slow()
    outlet = slow.outlet()
    outlet.put(1)
    assert slow.began.wait(PATIENCE_S)
    assert not outlet.close(0.0)
    slow.go.set()
    assert outlet.close(PATIENCE_S)
