"""The engine's threads and its public methods: submit, cancel, drain, stop.

Each lane has one thread, which runs steps (`step.py`) while there is work; otherwise it waits on a condition and uses
no CPU. Every request that `submit` accepts receives exactly one terminal event, also after faults.

Locks. `EngineState.lock` protects sequences, rows, blocks and the row budget of all lanes. A lane holds it during a
step, except while its runner computes: Python's work of one lane runs while the graphs of the others run. `_wake`
protects the flags of the engine and lets idle lanes wait; no step runs under it. A thread that holds one of the two
takes no other lock than that of the queue.
"""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from antiphon.domain.errors import AntiphonError, DeadlineExceeded, EngineFault, InvalidArgument, Unavailable
from antiphon.domain.limits import EngineLimits
from antiphon.domain.request import (
    ANSWERED,
    CancelCause,
    Cancellations,
    FinishReason,
    Pooling,
    Priority,
    Request,
    Task,
    TokenEvent,
)
from antiphon.engine.admission import AdmissionLimits, admit, check_ability, limits_of
from antiphon.engine.kv_cache import BlockHolder, BlockPool, holder_of
from antiphon.engine.request_queue import RequestQueue
from antiphon.engine.sequence import SequenceGroup
from antiphon.engine.step import EngineState, Stepper
from antiphon.engine.stream import Publisher, RequestStream
from antiphon.observability.engine_metrics import Metrics
from antiphon.runtime.runner import Runner
from antiphon.runtime.warm_up import warm_up

log = logging.getLogger(__name__)

# Number of consecutive failed steps after which the model itself is tested.
MAX_FAILED_STEPS = 8
# Time for the current step to end when all requests must end. The longest step of a large model takes one or two
# seconds.
_STOP_PATIENCE_S = 10.0
# Longest time for which the event loop may hold the interpreter lock. The default, 5 ms, is several engine steps.
_SWITCH_INTERVAL_S = 0.001
# New objects after which the garbage collector runs. One step creates more than the default of 700.
_COLLECT_AFTER = 10_000


class Heartbeat:
    """Distinguishes a thread that works or has nothing to do from a thread that hangs.

    clock: monotonic, in seconds. No method needs a lock, because its assignments are correct in any order.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._busy_since_s: float | None = None

    def beat(self) -> None:
        """Record that the thread begins a piece of work."""
        self._busy_since_s = self._clock()

    def rest(self) -> None:
        """Record that the thread has nothing to do."""
        self._busy_since_s = None

    def wake(self) -> None:
        """Record new work. The caller adds the work, and holds the lock under which the thread calls `rest`."""
        if self._busy_since_s is None:
            self._busy_since_s = self._clock()

    @property
    def busy_s(self) -> float:
        """Seconds since the current piece of work began, or since new work began to wait; 0 at rest."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else max(0.0, self._clock() - since_s)


@dataclass(kw_only=True, slots=True, eq=False)
class LaneThread:
    """Stepper, runner and thread of one lane.

    seen_steps: number of steps of all lanes at the beginning of its own last step.
    is_resting: it waits for a step of another lane.
    """

    stepper: Stepper
    runner: Runner
    heartbeat: Heartbeat
    thread: threading.Thread = field(init=False)
    seen_steps: int = -1
    is_resting: bool = False

    def make_thread(self, index: int, run: Callable[[LaneThread], None]) -> None:
        """Make the thread, which calls run with this lane."""
        name = "antiphon-engine" if index == 0 else f"antiphon-engine-{index}"
        self.thread = threading.Thread(target=run, args=(self,), name=name, daemon=True)

    @property
    def busy_s(self) -> float:
        """Seconds since the current step began, or since work began to wait for a step; 0 if idle."""
        return self.heartbeat.busy_s

    def join(self, timeout_s: float | None) -> None:
        """Wait for the end of the thread, if it was started."""
        if self.thread.ident is not None:
            self.thread.join(timeout_s)

    def stack(self) -> str:
        """Return the stack of the thread as text, the latest call last."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "the thread is gone\n"


class Engine:
    """Serves requests with the runners of one model. Methods are safe from any thread; only drain and stop block.

    more_runners: runners of more lanes, over the same cache blocks as the first.
    Construction raises ValueError, which names the limit that the runner cannot serve.
    """

    def __init__(
        self,
        runner: Runner,
        limits: EngineLimits,
        metrics: Metrics,
        *,
        more_runners: Sequence[Runner] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        runners = (runner, *more_runners)
        for lane_runner in runners:
            _check_rows(lane_runner, limits)
        self.request_numbers: Iterator[int] = itertools.count()
        """Numbers that make the ids of requests unique."""
        self._limits = limits
        self._pool = BlockPool(runner.facts.num_blocks, runner.facts.block_size)
        self._admission = limits_of(runner, limits)
        self._queue = RequestQueue(limits)
        self._live: dict[str, SequenceGroup] = {}
        self._cancellations = Cancellations()
        self._metrics = metrics
        self._clock = clock
        state = EngineState(
            runner,
            queue=self._queue,
            pool=self._pool,
            limits=limits,
            metrics=metrics,
            live=self._live,
            clock=clock,
            cancellations=self._cancellations,
        )
        self._lanes = [
            LaneThread(stepper=Stepper(state, lane_runner), runner=lane_runner, heartbeat=Heartbeat(clock))
            for lane_runner in runners
        ]
        self._state_lock = state.lock
        self._wake = threading.Condition()
        self._num_steps = 0  # of all lanes
        self._num_steps_seen = self._num_steps_freed = -1  # when idle caches were looked for, and freed
        self._is_accepting = self._is_draining = self._is_stopping = False
        self._end: Callable[[], AntiphonError] = _shutting_down
        for index, lane in enumerate(self._lanes):
            lane.make_thread(index, self._run)
        metrics.watch_queue(self._queue, clock)
        metrics.watch_steps(lambda: self.busy_s)

    @property
    def clock(self) -> Callable[[], float]:
        """Clock of arrival_s and deadline_s, in seconds."""
        return self._clock

    @property
    def admission(self) -> AdmissionLimits:
        """Limits within which a request can run."""
        return self._admission

    @property
    def is_alive(self) -> bool:
        """True while all threads of the engine run: not before start, after stop or after a fault that ended one."""
        return bool(self._lanes) and all(lane.thread.is_alive() for lane in self._lanes)

    @property
    def busy_s(self) -> float:
        """Seconds since the current step began, or since work began to wait for a step; 0 if idle."""
        return max(lane.busy_s for lane in self._lanes) if self.is_alive else 0.0

    def stack(self) -> str:
        """Return the stack of the thread whose step has run the longest, as text, the latest call last."""
        return max(self._lanes, key=lambda lane: lane.busy_s).stack() if self._lanes else "the thread is gone\n"

    @property
    def num_lanes(self) -> int:
        """Lanes that run steps side by side."""
        return len(self._lanes)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests being generated."""
        return sum(lane.stepper.num_running for lane in self._lanes)

    @property
    def max_num_seqs(self) -> int:
        """Rows that run together at most."""
        return self._limits.max_num_seqs

    @property
    def num_blocks(self) -> int:
        """Total number of cache blocks."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Cache blocks that no request holds."""
        return self._pool.num_free

    def block_holders(self) -> list[BlockHolder]:
        """Return the running requests that hold cache blocks, by ticket, all at the same moment.

        Blocks until no lane changes its state, which all of them permit while their graphs run: call it outside the
        event loop. Steps wait only while the blocks are copied.
        """
        with self._state_lock:
            holders = [holder_of(group) for lane in self._lanes for group in lane.stepper.admitted if group.blocks]
        return sorted(holders, key=lambda holder: holder.ticket)

    def free_idle_cache(self) -> None:
        """Return the cache's memory to the system if no request came since the last call. Blocks as block_holders does.

        The next requests get new pages, at most 0.2 ms for each 2 MB of them.
        """
        with self._state_lock:
            if self._num_steps != self._num_steps_seen:
                self._num_steps_seen = self._num_steps
            elif self._num_steps != self._num_steps_freed and not self._pool.num_used and self._lanes:
                self._num_steps_freed = self._num_steps
                self._lanes[0].runner.free_cache()  # all lanes share it

    def start(self) -> None:
        """Start the thread and accept requests; once."""
        with self._wake:
            self._is_accepting = not (self._is_draining or self._is_stopping)
        for lane in self._lanes:
            lane.thread.start()

    def submit(self, request: Request, stream: RequestStream) -> None:
        """Accept a request, whose events `stream` delivers, or refuse it with an error.

        Raises InvalidArgument if it could never run, Unsupported if the graphs cannot run it, DeadlineExceeded
        if its deadline has passed or is expected to pass before its answer, QueueFull if too many requests wait
        or it would wait too long, Unavailable before start and while draining.
        """
        try:
            self._submit(request, stream)
        except DeadlineExceeded:
            self._metrics.deadline_missed("submit")
            raise

    def check_ability(self, task: Task, pooling: Pooling = Pooling.MEAN) -> None:
        """Raise Unsupported if the model can never do this task. Call it before the request is read."""
        check_ability(task, pooling, self._admission)

    def check_room(self, client: str, priority: Priority) -> None:
        """Raise QueueFull if no request of this client could wait now. Call it before the request is read."""
        self._queue.check_room(client, priority, self._clock())

    def check_accepting(self) -> None:
        """Raise Unavailable before start and while draining. For calls that compute beside the engine."""
        if not self._is_accepting:
            raise Unavailable("the server is starting or shutting down")

    def cancel(self, request_id: str, cause: CancelCause = CancelCause.CLIENT) -> bool:
        """End a request within one step. Return False if it is unknown or has ended."""
        if request_id not in self._live:
            return False
        with self._wake:
            self._cancellations.put(request_id, cause)
            self._wake_lanes()
        return True

    def give_up(self, stream: RequestStream, cause: CancelCause) -> None:
        """Cancel an accepted request. If it has its answer already, count it as an answer that was not read."""
        stream.cancel_cause = cause
        if not self.cancel(stream.request_id, cause) and stream.end_reason in ANSWERED:
            self._metrics.left_unread(cause)

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, finish the accepted ones, then stop. Requests left after the timeout end at once.

        Returns whether all finished in time. Blocks: call it outside the event loop. A step that does not end keeps its
        rows and blocks; every waiting caller receives an error.
        """
        with self._wake:
            self._is_accepting = False
            self._is_draining = True
            self._wake.notify_all()
        self._join(timeout_s)
        has_finished = not self._is_any_alive()
        self._stop(_STOP_PATIENCE_S)
        if self._is_any_alive():
            log.critical("the engine hangs; stack of its thread:\n%s", self.stack())
            self._end_waiting_callers()
        return has_finished

    def stop(self) -> None:
        """End every request now, with Unavailable, and the thread. Blocks until the current step ends."""
        self._stop(None)

    def release(self) -> None:
        """Stop, and drop the runner, which is then freed even while the engine is referenced. Blocks as `stop` does."""
        self.stop()
        self._lanes = []

    def _stop(self, patience_s: float | None) -> None:
        with self._wake:
            self._is_accepting = False
            self._is_stopping = True
            self._wake_lanes()
        self._join(patience_s)

    def _join(self, timeout_s: float | None) -> None:
        """Wait until all threads have ended, or for this time."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        for lane in self._lanes:
            lane.join(None if end_s is None else max(0.0, end_s - time.monotonic()))

    def _is_any_alive(self) -> bool:
        return any(lane.thread.is_alive() for lane in self._lanes)

    def _wake_lanes(self) -> None:
        """Wake every lane that waits for work; the caller holds the condition."""
        self._num_steps += 1
        for lane in self._lanes:
            lane.heartbeat.wake()
        self._wake.notify_all()

    def _submit(self, request: Request, stream: RequestStream) -> None:
        group = admit(request, stream, self._admission)
        now_s = self._clock()
        if request.deadline_s is not None and request.deadline_s <= now_s:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        with self._wake:
            self.check_accepting()
            if request.request_id in self._live:
                raise InvalidArgument("request_id", request.request_id, "different from those of unfinished requests")
            # In `live` before it is queued: the current step may take it from the queue, and end it, at any moment.
            self._live[request.request_id] = group
            try:
                self._queue.put(group, now_s)
            except AntiphonError:
                del self._live[request.request_id]
                raise
            self._metrics.submitted(request.task, request.priority)
            self._wake_lanes()

    def _run(self, lane: LaneThread) -> None:
        try:
            while self._await_work(lane):
                lane.stepper.step()
                self._stepped(lane)
                if lane.stepper.num_failed >= MAX_FAILED_STEPS:
                    self._test_model(lane)
        except Exception:
            log.exception("the engine's thread ends after an error")
            self._fail()
        with self._wake:
            self._is_accepting = False
        self._queue.close()
        try:
            lane.stepper.end_all(self._end)
        except Exception:  # the engine's state may be wrong after a fault, and no caller may wait forever
            log.exception("the engine could not end its requests normally")
            self._end_waiting_callers()

    def _fail(self) -> None:
        """Let every lane end its requests, because this one cannot go on."""
        with self._wake:
            self._end = _failed
            self._is_stopping = True
            self._wake.notify_all()

    def _stepped(self, lane: LaneThread) -> None:
        """Wake lanes that wait for what this step may have freed."""
        if len(self._lanes) == 1:
            return
        with self._wake:
            if not lane.stepper.may_rest:
                self._num_steps += 1
                if any(other.is_resting for other in self._lanes):
                    self._wake.notify_all()

    def _test_model(self, lane: LaneThread) -> None:
        """Run the model without requests. Raises its error, which ends the engine; else requests caused the faults."""
        with self._state_lock:
            if self._pool.num_used:  # running requests will show a fault of the model
                return
            log.warning("%d consecutive steps failed; testing the model without requests", lane.stepper.num_failed)
            warm_up(lane.runner)
        lane.stepper.num_failed = 0
        log.warning("the model works; the requests caused the faults")

    def _end_waiting_callers(self) -> None:
        """Send an error to every waiting caller, in place of the engine's thread. Frees nothing."""
        finals = [
            (group.stream, TokenEvent(request_id=name, finish_reason=FinishReason.ERROR, is_last=True, error=_failed()))
            for name, group in list(self._live.items())
        ]
        Publisher().publish((), [], finals)

    def _await_work(self, lane: LaneThread) -> bool:
        """Wait until the lane has work. Return False when its thread must end."""
        with self._wake:
            while not (self._is_stopping or self._has_work(lane)):
                if self._is_draining and not self._live:
                    self._wake.notify_all()
                    return False
                lane.heartbeat.rest()
                lane.is_resting = True
                self._wake.wait()
                lane.is_resting = False
            lane.heartbeat.beat()
            lane.seen_steps = self._num_steps
            return not self._is_stopping

    def _has_work(self, lane: LaneThread) -> bool:
        """Return whether a step of the lane could do something that its last step could not."""
        stepper = lane.stepper
        return stepper.has_work and not (stepper.may_rest and lane.seen_steps == self._num_steps)


def _shutting_down() -> AntiphonError:
    return Unavailable("the server is shutting down")


def _failed() -> AntiphonError:
    return EngineFault("the engine failed")


def _check_rows(runner: Runner, limits: EngineLimits) -> None:
    if limits.max_num_seqs > (most := runner.facts.max_rows):
        raise ValueError(
            f"max_num_seqs is {limits.max_num_seqs}; it must be 1 to {most}, the rows of the model's caches"
        )


@contextmanager
def interpreter_for_steps() -> Iterator[None]:
    """Pass the interpreter lock on sooner, and collect garbage less often: a collection stops engine and event loop.

    Existing objects are never collected meanwhile. Models are loaded later, so that an unloaded model is.
    """
    interval_s, thresholds = sys.getswitchinterval(), gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER, *thresholds[1:])
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval_s)
        gc.set_threshold(*thresholds)
        gc.unfreeze()
