"""Limits of machine and container: read where they are written, and compared with what models may come to use."""

from __future__ import annotations

import logging
import resource
from pathlib import Path

import pytest

from antiphon.service.errors import OverBudget
from antiphon.service.hosting.machine import allow_files, check_memory, memory_bytes
from antiphon.service.hosting.memory import ModelMemory

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
def test_memory_is_the_containers_or_the_machines_whichever_is_less(
    tmp_path: Path, name: str, content: str, expected: int
) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / name).write_text(content)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemFree:   1 kB\nMemTotal:        4096 kB\nOdd\n")
    assert memory_bytes(tmp_path, meminfo) == expected


def test_memory_is_unknown_where_nothing_tells(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path, tmp_path / "meminfo") is None


@pytest.mark.parametrize(("available_bytes", "is_warned"), [(None, False), (1120, False), (1119, True), (120, True)])
def test_models_that_fill_the_machine_are_warned_of(
    caplog: pytest.LogCaptureFixture, available_bytes: int | None, *, is_warned: bool
) -> None:
    check_memory({"m": MODEL}, available_bytes)
    assert [record.levelno for record in caplog.records] == ([logging.WARNING] if is_warned else [])
    assert all(figure in caplog.text for figure in ("1120", "1000", str(available_bytes))) == is_warned


def test_models_that_cannot_run_on_the_machine_are_refused() -> None:
    with pytest.raises(OverBudget, match=r"m, n: weights and workspaces need 240 bytes; .* has 239"):
        check_memory({"m": MODEL, "n": MODEL}, 239)


def test_open_files_are_allowed_as_far_as_possible(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"soft": 100, "hard": 1000}

    def set_limits(kind: int, wanted: tuple[int, int]) -> None:
        assert (kind, wanted[1]) == (resource.RLIMIT_NOFILE, limits["hard"])
        limits["soft"] = wanted[0]

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits["soft"], limits["hard"]))
    monkeypatch.setattr(resource, "setrlimit", set_limits)
    for num_connections, soft, num_warnings in ((10, 100, 0), (500, 564, 0), (300, 564, 0), (5000, 1000, 1)):
        allow_files(num_connections)
        assert (limits["soft"], len(caplog.records)) == (soft, num_warnings)
