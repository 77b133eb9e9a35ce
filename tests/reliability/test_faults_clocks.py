"""Servers with any value of the monotonic clock, from which deadlines, time limits and pings are counted."""

import shutil
import subprocess
from pathlib import Path

import grpc
import pytest

from antiphon.client import AsyncClient, Options, ServerError
from antiphon.server.settings import SHIPPED_BUNDLE
from tests.integration.process import ServerProcess, is_idle
from tests.reliability.asking import LONG, ask, references, whole

# Seconds added to the clock since boot: a machine that has just started, and one that has run for 30 years.
SHIFTS = {"just booted": None, "up for 30 years": 30 * 365 * 86_400}


def shifted(seconds: int) -> tuple[str, ...]:
    """Return the command prefix that runs a command in a separate time namespace."""
    offset = str(seconds)
    return ("unshare", "--time", "--monotonic", offset, "--boottime", offset)


def _why_not() -> str | None:
    if shutil.which("unshare") is None:
        return "unshare is not installed"
    tried = subprocess.run([*shifted(1), "true"], capture_output=True, check=False)
    return tried.stderr.decode().strip() if tried.returncode else None


pytestmark = [
    pytest.mark.hardship,
    pytest.mark.skipif(_why_not() is not None, reason=f"no time namespace: {_why_not()}"),
]


def uptime_s() -> float:
    return float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])


@pytest.mark.parametrize("shift", SHIFTS)
async def test_deadlines_hold_for_any_value_of_the_monotonic_clock(shift: str) -> None:
    seconds = SHIFTS[shift]
    prefix = shifted(1 - int(uptime_s()) if seconds is None else seconds)
    with ServerProcess(SHIPPED_BUNDLE, prefix=prefix) as server:
        async with AsyncClient(server.target) as client:
            expected = await references(client, range(8))
            assert {number: await whole(client, number, timeout_s=60) for number in range(8)} == expected
            with pytest.raises(ServerError) as caught:
                await whole(client, LONG, timeout_s=0.02)
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            limited = Options(max_new_tokens=240, ignore_eos=True, time_limit_millis=20)
            (output,) = await client.generate_outputs(ask(LONG).text, limited)
            assert output.finish_reason == "time_limit"
        server.wait_for_metrics(is_idle)
