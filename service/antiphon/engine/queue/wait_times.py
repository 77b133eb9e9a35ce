"""Expected waiting times, from the speed at which the queue drains."""

from __future__ import annotations

from antiphon.engine.queue.drain_rate import AnswerPace, DrainRate
from antiphon.engine.queue.service_order import Newcomer, ServiceOrder


class WaitTimes:
    """Expected times until requests are served and answered. Only one thread may use it at a time."""

    def __init__(self, order: ServiceOrder) -> None:
        self._order = order
        self.drain = DrainRate()
        self.pace = AnswerPace()

    def until_empty_s(self, now_s: float) -> float | None:
        """Return the time to serve all waiting groups; None without evidence, 0 if no new group waits."""
        cost = self._order.new_cost
        return self._seconds(cost, now_s) if cost else 0.0

    def of_newcomer_s(self, newcomer: Newcomer, now_s: float) -> float | None:
        """Return the time until an arriving request would be served; None without evidence."""
        return self._seconds(self._order.cost_before(newcomer), now_s)

    def _seconds(self, cost: int, now_s: float) -> float | None:
        """Return the time to serve this cost after all preempted requests."""
        rate = self.drain.per_second(now_s)
        if rate is None:
            return None
        return (cost + self._order.preempted_cost) / max(rate, 1e-9)
