"""A device for the runner of GPUs that computes nothing and takes as long as a card did.

Its memory is the host's, and its stream is the time at which all work that was launched will have ended. Who waits for
it sleeps without the interpreter lock. Steps last as on an H100 with the shape of BART-large in bfloat16, sources of
350 tokens and steps ahead (docs/benchmarks/gpu-h100.json), copies included; encoder passes last what encoding added
there. Every row gets the same word at every step, so that targets have the length that is asked for.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from antiphon.ops.cuda.driver import CudaDevice, CudaEvent, DeviceDescription, DeviceMemory, PinnedMemory
from antiphon.runtime.cuda import runner as runner_module
from antiphon.runtime.cuda.cuda_graph import Bound, CudaGraph, ElementType

STEP_MS = {1: 0.79, 32: 1.08, 64: 1.26, 256: 2.98}
"""Milliseconds of a decoder step by rows; in between on straight lines."""
ENCODE_US = 1.25
"""Microseconds of an encoder pass a token: encoding 22,400 tokens added 28.6 ms to a run, 89,600 tokens 109 ms."""
LAUNCH_US = 100
"""Microseconds of a launch by ONNX Runtime: an assumption, within the 260 us that steps ahead hid on the card."""
WORD_ID = 300
_MEMORY_BYTES = 80 << 30
_PR_SET_TIMERSLACK = 29  # of linux/prctl.h


@dataclass(kw_only=True, slots=True)
class StepTimes:
    """Decoder steps since the start, and seconds.

    busy_s: work of the device, encoder passes included. launch_s: launches, until the thread ran again. waiting_s:
    waits until the device had finished. late_s: from then until the thread ran again. cpu_s: of the threads that launch
    steps, from the first step of each on.
    """

    steps: int = 0
    busy_s: float = 0.0
    launch_s: float = 0.0
    waiting_s: float = 0.0
    late_s: float = 0.0
    cpu_s: float = 0.0


class WaitingDevice(CudaDevice):
    """The device. times: what it measures."""

    def __init__(self) -> None:
        self.ordinal = 0
        self.times = StepTimes()
        self._stream = 0
        self._end_s = 0.0
        self._thread = threading.local()

    @property
    def end_s(self) -> float:
        """Time at which the stream has no work left, by time.perf_counter."""
        return self._end_s

    def description(self) -> DeviceDescription:
        """Return a card with memory for every cache."""
        return DeviceDescription(
            name="waiting device", architecture=90, num_multiprocessors=132, driver_version=0,
            total_bytes=_MEMORY_BYTES, free_bytes=_MEMORY_BYTES,
        )  # fmt: skip

    def use(self) -> None:
        """Let this thread's sleeps end on time; the kernel's default is 50 us later."""
        if not hasattr(self._thread, "is_exact"):
            self._thread.is_exact = True
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def launch(self, seconds: float) -> None:
        """Launch work that takes this long."""
        began_s = time.perf_counter()
        time.sleep(LAUNCH_US / 1e6)
        now_s = time.perf_counter()
        self.times.launch_s += now_s - began_s
        self._end_s = max(self._end_s, now_s) + seconds
        self.times.busy_s += seconds

    def sleep_until(self, end_s: float) -> None:
        """Sleep until a time; return at once if it has passed."""
        began_s = time.perf_counter()
        if end_s <= began_s:
            return
        time.sleep(end_s - began_s)
        self.times.waiting_s += end_s - began_s
        self.times.late_s += time.perf_counter() - end_s

    def stepped(self) -> None:
        """Note a decoder step of this thread."""
        self.times.steps += 1
        cpu_s = time.thread_time()
        self.times.cpu_s += cpu_s - getattr(self._thread, "cpu_s", cpu_s)
        self._thread.cpu_s = cpu_s

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Return memory of the host full of zeros, whose pages the system gives at their first use."""
        return _HostMemory(np.zeros(max(num_bytes, 1), np.uint8))

    def allocate_pinned(self, num_bytes: int) -> PinnedMemory:
        """Return memory of the host full of zeros."""
        array = np.zeros(max(num_bytes, 1), np.uint8)
        return PinnedMemory(array.ctypes.data, array)

    def copy_in(self, target: int, source: int, num_bytes: int) -> None:
        """Copy at once."""
        ctypes.memmove(target, source, num_bytes)

    def copy_out(self, target: int, source: int, num_bytes: int) -> None:
        """Copy at once."""
        ctypes.memmove(target, source, num_bytes)

    def copy_within(self, target: int, source: int, num_bytes: int) -> None:
        """Do nothing: blocks have no content."""

    def event(self) -> CudaEvent:
        """Return an event of the stream."""
        return _Event(self)

    def wait(self) -> None:
        """Wait until the stream has no work left."""
        self.sleep_until(self._end_s)


class _HostMemory(DeviceMemory):
    """Memory of the host in place of a device's."""

    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        super().__init__(array.ctypes.data, array.nbytes)
        object.__setattr__(self, "_array", array)


class _Event(CudaEvent):
    def __init__(self, device: WaitingDevice) -> None:
        self._device = device
        self._at_s = 0.0

    def record(self) -> None:
        self._at_s = self._device.end_s

    def wait(self) -> None:
        self._device.sleep_until(self._at_s)


class _Binding(Bound):
    """Shapes of a graph's inputs, and addresses of its outputs."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def bind_input(self, name: str, kind: ElementType, shape: Sequence[int], address: int) -> None:
        self.shapes[name] = tuple(shape)

    def bind_output(self, name: str, kind: ElementType, shape: Sequence[int], address: int) -> None:
        self.shapes[name], self.addresses[name] = tuple(shape), address


class WaitingGraph(CudaGraph):
    """A graph on a WaitingDevice. Arguments as for CudaGraph."""

    def __init__(self, path: Path, kind: str, device: CudaDevice, **_: object) -> None:
        assert isinstance(device, WaitingDevice)
        self._waiting = device
        self._is_decoder = kind == "decoder"

    def bind(self) -> Bound:
        """Return a binding without inputs and outputs."""
        return _Binding()

    def run(self, bound: Bound, graph_id: int = -1) -> None:
        """Launch a run; the words of a step are there at once."""
        assert isinstance(bound, _Binding)
        num_tokens = math.prod(bound.shapes["tokens"])
        if not self._is_decoder:
            self._waiting.launch(1e-6 * ENCODE_US * num_tokens)
            return
        self._waiting.launch(1e-3 * float(np.interp(num_tokens, list(STEP_MS), list(STEP_MS.values()))))
        count = math.prod(bound.shapes["token_ids"])
        words = (ctypes.c_int32 * count).from_address(bound.addresses["token_ids"])
        np.ctypeslib.as_array(words)[:] = WORD_ID
        self._waiting.stepped()


@contextmanager
def in_place_of_a_card() -> Iterator[WaitingDevice]:
    """Let servers and runners of GPUs in this process use a WaitingDevice, which this yields."""
    from antiphon.server import app  # not where a server is only started

    device = WaitingDevice()
    with (
        mock.patch.object(runner_module, "CudaGraph", WaitingGraph),
        mock.patch.object(app, "open_device", return_value=device),
    ):
        yield device


def difference(after: StepTimes, before: StepTimes) -> StepTimes:
    """Return what a device measured between two moments."""
    earlier = asdict(before)
    return StepTimes(**{name: value - earlier[name] for name, value in asdict(after).items()})
