"""Deadlines are correct after a jump of the machine's clock, and no serving code reads that clock."""

import ast
import asyncio
import time
from pathlib import Path

import grpc
import pytest

import antiphon.client
from tests.serving import Gate, asking_whole, refusal, serving, stub_of

# Who may read the wall clock: what is stamped for people, and what makes good for its jumps.
ALLOWED = {"access_log.py", "answering.py", "deadline.py", "families.py", "logging.py", "tracing.py"}
WALL_CLOCKS = {"time", "time_ns", "localtime", "gmtime", "ctime", "now", "utcnow", "today"}


def jump(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the clock, only for Python. Calls of this process already have their deadlines when they are made."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + seconds)


@pytest.mark.parametrize("jump_s", [-3600.0, -1.0, 1.0, 3600.0])
async def test_call_with_a_deadline_survives_a_set_clock(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    async with serving() as served:
        call = stub_of(served).GenerateUnary(asking_whole(), timeout=30)
        jump(monkeypatch, jump_s)
        answer = await call
    assert answer.outputs


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
async def test_deadline_is_kept_after_the_clock_was_set(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    async with serving() as served:
        gate = Gate(served.runner)
        call = stub_of(served).GenerateUnary(asking_whole((30, 30)), timeout=0.3)
        jump(monkeypatch, jump_s)
        error = await refusal(call)
        async with asyncio.timeout(60):  # which the server's own end of the call must not exceed by an hour
            await served.calls.wait_until_idle()
        gate.open()
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_nothing_that_serves_reads_the_wall_clock() -> None:
    service = Path(antiphon.client.__file__).parents[1]
    paths = [path.relative_to(service) for path in service.rglob("*.py")]
    served = [path for path in paths if path.parts[0] not in ("cli", "load", "play") and "bench" not in path.parts]
    assert len(served) > 100
    assert {path.name for path in served if _wall_clocks(service / path)} == ALLOWED


def _wall_clocks(path: Path) -> set[str]:
    """Return the names of wall clocks that a module uses from `time` or `datetime`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in WALL_CLOCKS
        and isinstance(node.value, ast.Name)
        and node.value.id in ("time", "datetime", "date")
    }
