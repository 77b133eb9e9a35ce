"""A simulated replica compared with closed formulas of queueing theory."""

import math

import numpy as np
import pytest

from antiphon.domain.limits import EngineLimits
from antiphon.tools.capacity.simulated_replica import Answers, ServiceCurve, SimulatedReplica

NUM_REQUESTS = 200_000
# Means over this number of dependent waits vary by about a hundredth at the loads below.
TOLERANCE = 0.05


def _run(curve: ServiceCurve, max_rows: int, rate: float, work: np.ndarray, queue: tuple[int, float | None]) -> Answers:
    rng = np.random.default_rng(7)
    arrivals = np.cumsum(rng.exponential(1 / rate, len(work)))
    answers = Answers()
    bounds = EngineLimits(max_num_seqs=max_rows, max_queued_requests=queue[0], max_queue_time_s=queue[1])
    replica = SimulatedReplica(curve, bounds, answers, ready_s=0.0)
    replica.run(zip(arrivals.tolist(), work.tolist(), strict=True), float(arrivals[-1]) + 1e6)
    assert len(answers.latency_s) + len(answers.refused_s) == len(work)
    assert replica.num_running == replica.num_waiting == 0
    return answers


def _curve(rows: tuple[int, ...], per_s: tuple[float, ...]) -> ServiceCurve:
    return ServiceCurve(rows=rows, answers_per_s=per_s, work=(1.0,), origin="test")


UNBOUNDED = (1_000_000, None)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_row_with_equal_work_waits_like_m_d_1(load: float) -> None:
    """Pollaczek-Khinchine: W = rho D / (2 (1 - rho))."""
    seconds = 0.02
    answers = _run(_curve((1,), (1 / seconds,)), 1, load / seconds, np.ones(NUM_REQUESTS), UNBOUNDED)
    expected = load * seconds / (2 * (1 - load))
    assert np.mean(answers.wait_s) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("load", [0.6, 0.85])
def test_independent_rows_wait_like_m_m_c(load: float) -> None:
    """Erlang C: the share of waiting requests, and the mean wait."""
    rows, per_s = 8, 5.0
    work = np.random.default_rng(3).exponential(1.0, NUM_REQUESTS)
    answers = _run(_curve((rows,), (rows * per_s,)), rows, load * rows * per_s, work, UNBOUNDED)
    offered = load * rows
    last = offered**rows / math.factorial(rows) / (1 - load)
    waiting = last / (sum(offered**k / math.factorial(k) for k in range(rows)) + last)
    waits = np.array(answers.wait_s)
    assert np.mean(waits > 1e-9) == pytest.approx(waiting, rel=TOLERANCE)
    assert np.mean(waits) == pytest.approx(waiting / (rows * per_s * (1 - load)), rel=TOLERANCE)


@pytest.mark.parametrize("spread", ["equal", "exponential"])
def test_shared_rows_answer_like_processor_sharing(spread: str) -> None:
    """M/G/1 with processor sharing: T = S / (1 - rho) for any distribution of work."""
    load, seconds, rows = 0.7, 0.01, 512
    rng = np.random.default_rng(5)
    work = np.ones(NUM_REQUESTS) if spread == "equal" else rng.exponential(1.0, NUM_REQUESTS)
    curve = _curve((1, rows), (1 / seconds, 1 / seconds))
    answers = _run(curve, rows, load / seconds, work, UNBOUNDED)
    assert np.mean(answers.latency_s) == pytest.approx(seconds / (1 - load), rel=TOLERANCE)
    assert max(answers.wait_s) == 0


def test_overload_is_refused_and_the_rest_answered_at_the_most() -> None:
    """Twice what it can do: half is refused, and nobody waits longer than the queue takes to drain."""
    answers = _run(_curve((1,), (50.0,)), 1, 100.0, np.ones(50_000), (20, None))
    assert len(answers.refused_s) / 50_000 == pytest.approx(0.5, rel=TOLERANCE)
    assert max(answers.wait_s) <= 20 / 50 + 1e-9
    by_time = _run(_curve((1,), (50.0,)), 1, 100.0, np.ones(50_000), (1_000_000, 0.2))
    assert max(by_time.wait_s) == pytest.approx(0.2, abs=1 / 50)
