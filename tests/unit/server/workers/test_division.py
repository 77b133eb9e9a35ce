"""Division of the cores among workers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from antiphon.server.machine import usable_cores
from antiphon.server.settings import ConfigError, ServerConfig
from antiphon.server.workers import division
from antiphon.server.workers.division import BYTES_PER_CORE, divide, neighbours_first, suggested_workers


@pytest.fixture
def seven_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "usable_cores", lambda: 7)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 3, 5, 6, 7, 9})


@pytest.mark.usefixtures("seven_cores")
def test_every_core_belongs_to_one_worker() -> None:
    shares = divide(ServerConfig(workers=3))
    assert sorted(core for share in shares for core in share.cores) == [1, 2, 3, 5, 6, 7, 9]
    assert sorted(share.threads for share in shares) == [2, 2, 3]
    assert [len(share.cores) for share in shares] == [share.threads for share in shares]


@pytest.mark.usefixtures("seven_cores")
def test_threads_are_those_of_the_setting() -> None:
    assert [share.threads for share in divide(ServerConfig(workers=2, threads=5))] == [5, 5]


def test_workers_of_a_container_with_a_quota_are_not_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "usable_cores", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert [(share.cores, share.threads) for share in divide(ServerConfig(workers=2))] == [((), 2), ((), 2)]


def test_more_workers_than_cores_are_refused() -> None:
    with pytest.raises(ConfigError, match="workers is 200; it must be at most"):
        divide(ServerConfig(workers=200))


def test_small_models_have_more_workers_than_large_ones() -> None:
    numbers = [suggested_workers(size * BYTES_PER_CORE, 16) for size in (0, 1, 2, 4, 8, 16, 100)]
    assert numbers == [16, 16, 8, 4, 2, 1, 1]
    assert 1 <= len(divide(ServerConfig(workers="auto"))) <= usable_cores()


def test_hardware_threads_of_a_core_are_neighbours(tmp_path: Path) -> None:
    for cpu, (package, core) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1), (0, 0), (1, 0), (0, 1), (1, 1)]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    assert neighbours_first(range(8), tmp_path) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert neighbours_first([3, 1], tmp_path / "absent") == [1, 3]
