"""The memory limit that `antiphon size` prints, compared with the real server: sufficient, and not much too large."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import pytest

from antiphon.cli.main import main
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.tools.capacity.size_report import SCRAPE_BYTES, SCRAPE_SAMPLES
from tests.deploy.full_server import MIB, fill, peak_bytes
from tests.integration.process import PATIENCE_S, ServerProcess
from tests.marks import programs

pytestmark = programs

# One client can fill three quarters of the queue.
WAITING = 700
# Terms that only clients fill that let the server wait: tests/abuse compares the limit with their attacks.
OF_ABUSE = {"calls", "unaccepted calls", "arriving requests", "unread answers"}
# So long that no request is refused for its expected wait.
QUIET_AND_PATIENT = ["--access-log", "none", "--max-queue-time-s", "3600"]


def test_printed_memory_limit_suffices_for_a_full_server(capsys: pytest.CaptureFixture[str]) -> None:
    """The load has 64 rows of the longest sources, a full cache, a long queue and scored targets."""
    assert main(["size", "--workers", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    flags = [
        word for name, value in printed["settings"].items() for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    with ServerProcess(SHIPPED_BUNDLE, [*flags, *QUIET_AND_PATIENT]) as server:
        rows = printed["settings"]["max_num_seqs"]
        asyncio.run(fill(server, rows=rows, waiting=WAITING, source_len=256, target_len=256))
        peak, limit = peak_bytes(server), printed["memory_limit_bytes"]
        with urllib.request.urlopen(server.metrics_url, timeout=PATIENCE_S) as response:
            scrape = response.read()
    used_bytes = sum(term["bytes"] for term in printed["memory_terms"] if term["name"] not in OF_ABUSE)
    said = f"peak {peak / MIB:.0f} MiB of {limit / MIB:.0f}"
    assert peak <= limit, said
    assert used_bytes <= 2 * peak, said
    num_samples = sum(1 for line in scrape.splitlines() if not line.startswith(b"#"))
    assert num_samples == pytest.approx(SCRAPE_SAMPLES, rel=0.2)
    assert len(scrape) == pytest.approx(SCRAPE_BYTES, rel=0.2)
