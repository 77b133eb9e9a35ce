"""Limits of machine and container, trimming of the heap, and the first command that `antiphon serve` suggests."""

import logging
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.domain.errors import OverBudget
from antiphon.server.machine import allow_files, memory_bytes
from antiphon.server.models.memory import ModelMemory, check_memory
from antiphon.server.ports import first_command
from antiphon.server.watch import ConnectionWatch, MemoryTrimmer
from antiphon.v1 import inference_pb2 as pb
from tests.fakes import FakeClock

MODEL = ModelMemory(weight_bytes=100, cache_bytes=1000, workspace_bytes=20)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("memory.max", "2048\n", 2048),
        ("memory.max", "max\n", 4096 * 1024),
        ("memory/memory.limit_in_bytes", "3000\n", 3000),
        ("memory/memory.limit_in_bytes", "9223372036854771712\n", 4096 * 1024),
        ("memory.max", "\xff", 4096 * 1024),
        ("unread", "", 4096 * 1024),
    ],
)
def test_memory_is_the_lower_of_the_limits_of_container_and_machine(
    tmp_path: Path, name: str, content: str, expected: int
) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / name).write_text(content)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemFree:   1 kB\nMemTotal:        4096 kB\nOdd\n")
    assert memory_bytes(tmp_path, meminfo) == expected


def test_memory_is_unknown_when_nothing_reports_it(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path, tmp_path / "meminfo") is None


@pytest.mark.parametrize(("available_bytes", "is_warned"), [(None, False), (1120, False), (1119, True), (120, True)])
def test_models_that_fill_the_machine_cause_a_warning(
    caplog: pytest.LogCaptureFixture, available_bytes: int | None, *, is_warned: bool
) -> None:
    check_memory({"m": MODEL}, available_bytes)
    assert [record.levelno for record in caplog.records] == ([logging.WARNING] if is_warned else [])
    assert all(figure in caplog.text for figure in ("1120", "1000", str(available_bytes))) == is_warned


def test_models_that_cannot_run_on_the_machine_are_refused() -> None:
    with pytest.raises(OverBudget, match=r"m, n: weights and workspaces need 240 bytes; .* has 239"):
        check_memory({"m": MODEL, "n": MODEL}, 239)


NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "num_connections", "num_others", "expected", "room", "is_warned"),
    [
        ((100, 1000), 10, 0, 1000, 936, False),
        ((100, 1000), 936, 0, 1000, 936, False),
        ((100, 1000), 937, 0, 1000, 936, True),
        ((100, 1000), 800, 128, 1000, 808, False),
        ((100, 100), 10, 0, 100, 36, False),
        ((100, 100), 1000, 128, 100, 25, True),  # a quarter, because the other files would use all
        ((1000, NO_LIMIT), 10, 0, 1_000_000, 999_936, False),
        ((1000, NO_LIMIT), 2_000_000, 0, 2_000_064, 2_000_000, False),
        ((NO_LIMIT, NO_LIMIT), 10, 0, NO_LIMIT, None, False),
    ],
)
def test_limit_of_open_files_is_raised_and_some_are_reserved(
    limits: tuple[int, int],
    num_connections: int,
    num_others: int,
    expected: int,
    room: int | None,
    *,
    is_warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = {resource.RLIMIT_NOFILE: limits}
    monkeypatch.setattr(resource, "getrlimit", held.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", held.__setitem__)
    assert allow_files(num_connections, num_others) == room
    assert held == {resource.RLIMIT_NOFILE: (expected, limits[1])}
    assert len(caplog.records) == is_warned


def test_full_port_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock, num_files = FakeClock(), [30]
    watch = ConnectionWatch(10, lambda: num_files[0], clock)
    for num_open, is_full, num_warnings in (
        (39, False, 0),
        (40, True, 1),
        (41, True, 1),
        (39, False, 1),
        (40, True, 1),
    ):
        num_files[0] = num_open
        watch.check()
        assert (watch.is_full, len(caplog.records)) == (is_full, num_warnings)
    clock.advance(60.0)
    watch.check()
    assert len(caplog.records) == 2
    assert "10 connections are open" in caplog.text


def test_a_port_without_a_limit_is_never_full(caplog: pytest.LogCaptureFixture) -> None:
    watch = ConnectionWatch(None, lambda: 10**6)
    watch.check()
    assert (watch.is_full, caplog.records) == (False, [])


def test_open_files_are_counted() -> None:
    """In a process of its own: other tests leave sockets whose collection closes them at any time."""
    code = """
import tempfile
from antiphon.server.watch import num_open_files
before = num_open_files()
with tempfile.TemporaryFile(), tempfile.TemporaryFile():
    print(num_open_files() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"


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


@pytest.fixture
def heap() -> Heap:
    return Heap()


async def checked(heap: Heap, trimmer: MemoryTrimmer, num_times: int) -> int:
    """Return the number of trims in a number of checks."""
    before = heap.num_trims
    for _ in range(num_times):
        await trimmer.check()
    return heap.num_trims - before


async def test_heap_is_trimmed_when_memory_is_freed_long_after_it_grew(heap: Heap) -> None:
    """Calls held their answers for 30 s after memory had stopped growing, and that memory stayed resident."""
    trimmer = MemoryTrimmer(heap.resident, heap.trim)
    heap.used += 50 * MB
    await checked(heap, trimmer, 40)
    heap.used -= 50 * MB
    heap.free += 50 * MB
    await checked(heap, trimmer, 40)
    assert heap.resident() == 100 * MB


async def test_heap_is_trimmed_seldom_by_an_idle_server_and_at_the_next_check_after_growth(heap: Heap) -> None:
    trimmer = MemoryTrimmer(heap.resident, heap.trim)
    numbers = [await checked(heap, trimmer, 100) for _ in range(4)]
    assert 4 >= numbers[-1] < numbers[0]
    heap.free += 10 * MB
    assert await checked(heap, trimmer, 1) == 1


async def test_heap_is_not_trimmed_without_glibc(heap: Heap) -> None:
    heap.free = 50 * MB
    await MemoryTrimmer(heap.resident, None).check()
    assert heap.free == 50 * MB


TARGET = "--target 127.0.0.1:1 "


def model(architecture: pb.Architecture.ValueType, *tasks: pb.Task.ValueType, mask_token: str = "") -> pb.Model:
    described = [pb.TaskDescription(task=task) for task in tasks]
    return pb.Model(architecture=architecture, tasks=described, mask_token=mask_token)


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        (model(pb.ARCHITECTURE_ENCODER_DECODER), f'generate {TARGET}"How are you?"'),
        (model(pb.ARCHITECTURE_DECODER), f'generate {TARGET}"How are you?"'),
        (model(pb.ARCHITECTURE_ENCODER, pb.TASK_POOL, pb.TASK_CLASSIFY), f'classify {TARGET}"How are you?"'),
        (model(pb.ARCHITECTURE_ENCODER, pb.TASK_TAG), f'tag {TARGET}"How are you?"'),
        (
            model(pb.ARCHITECTURE_ENCODER, pb.TASK_NEXT_SENTENCE, pb.TASK_FILL_MASK, mask_token="[MASK]"),
            f'fill-mask {TARGET}"How are [MASK]?"',
        ),
        (model(pb.ARCHITECTURE_ENCODER), "models list --target 127.0.0.1:1"),
    ],
)
def test_first_command_matches_the_abilities_of_the_model(served: pb.Model, expected: str) -> None:
    assert first_command(served, TARGET) == expected


def test_first_command_omits_the_target_when_it_is_the_default() -> None:
    assert first_command(model(pb.ARCHITECTURE_ENCODER), "") == "models list"
