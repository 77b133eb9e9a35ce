"""Settings of the Python interpreter under which an engine steps beside an event loop."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Longest time for which the event loop may hold the interpreter lock. The default, 5 ms, is several engine steps.
_SWITCH_INTERVAL_S = 0.001
# New objects after which the garbage collector runs. One step creates more than the default of 700.
_COLLECT_AFTER = 10_000


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
