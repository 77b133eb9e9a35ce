"""Conditions for trimming the heap. The test supplies sizes and the trim function."""

from __future__ import annotations

from antiphon.server.watch import MemoryTrimmer

MB = 1 << 20


class Heap:
    """Memory of a process: bytes in use, and free bytes that a trim returns."""

    def __init__(self) -> None:
        self.used = 100 * MB
        self.free = 0
        self.num_trims = 0

    def resident(self) -> int:
        return self.used + self.free

    def trim(self, _: int) -> None:
        self.num_trims += 1
        self.free = 0


async def test_caches_of_idle_engines_are_looked_at_every_ten_seconds() -> None:
    heap, looks = Heap(), []

    class Engine:
        def free_idle_cache(self) -> None:
            looks.append(heap.num_trims)

    freeing = MemoryTrimmer(heap.resident, heap.trim, lambda: [Engine(), Engine()])
    for _ in range(10):
        await freeing.check()
    assert len(looks) == 4


async def test_heap_is_trimmed_when_memory_is_freed_long_after_it_grew() -> None:
    """Calls held their answers for 30 s after memory had stopped growing, and that memory stayed resident."""
    heap = Heap()
    freeing = MemoryTrimmer(heap.resident, heap.trim)
    heap.used += 50 * MB
    for _ in range(40):
        await freeing.check()
    heap.used -= 50 * MB
    heap.free += 50 * MB
    for _ in range(40):
        await freeing.check()
    assert heap.resident() == 100 * MB


async def test_heap_is_trimmed_less_and_less_often_when_the_server_is_idle() -> None:
    heap = Heap()
    freeing = MemoryTrimmer(heap.resident, heap.trim)
    numbers = []
    for _ in range(4):
        before = heap.num_trims
        for _ in range(100):
            await freeing.check()
        numbers.append(heap.num_trims - before)
    assert numbers[0] > numbers[-1]
    assert numbers[-1] <= 4


async def test_heap_is_trimmed_at_the_next_check_after_growth() -> None:
    heap = Heap()
    freeing = MemoryTrimmer(heap.resident, heap.trim)
    for _ in range(200):
        await freeing.check()
    before = heap.num_trims
    heap.free += 10 * MB
    await freeing.check()
    assert heap.num_trims == before + 1


async def test_heap_is_not_trimmed_without_glibc() -> None:
    heap = Heap()
    heap.free = 50 * MB
    await MemoryTrimmer(heap.resident, None).check()
    assert heap.free == 50 * MB
