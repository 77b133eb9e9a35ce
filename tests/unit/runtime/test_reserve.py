"""Memory of reserved arrays: resident once written, until it is freed."""

from __future__ import annotations

import numpy as np

from antiphon.runtime.native import free, reserve
from antiphon.server.models.machine import ResidentMemory

NUM_BYTES = 256 << 20


def test_freed_array_is_zero_again_and_takes_no_memory() -> None:
    resident = ResidentMemory()
    array = reserve((2, NUM_BYTES // 8), np.dtype("float32"), "a test")
    neighbour = np.ones(1000, np.float32)
    empty = resident.num_bytes()
    array.fill(1.0)
    assert resident.num_bytes() - empty > NUM_BYTES // 2
    free(array)
    assert resident.num_bytes() - empty < NUM_BYTES // 2
    assert not array[:, ::1000].any()
    array[1, -1] = 2.0
    assert array[1, -1] == 2.0
    free(neighbour)  # not reserved: unchanged
    assert neighbour.all()
