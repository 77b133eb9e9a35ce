"""One lane of an engine: a thread that runs steps with its own runner and rows."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from antiphon.engine.heartbeat import Heartbeat
from antiphon.engine.step.stepper import Stepper
from antiphon.runtime.runner import Runner


@dataclass(kw_only=True, slots=True, eq=False)
class Lane:
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

    def make_thread(self, index: int, run: Callable[[Lane], None]) -> None:
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
