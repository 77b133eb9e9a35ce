"""Limits of machine and container: reading them, and comparing them with the memory of the models."""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.domain.errors import OverBudget
from antiphon.server.machine import allow_files, memory_bytes
from antiphon.server.models.memory import ModelMemory, check_memory
from antiphon.server.watch import ConnectionWatch
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
