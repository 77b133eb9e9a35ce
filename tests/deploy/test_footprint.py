"""The memory limit that `antiphon size` prints, compared with the real server: sufficient, and not much too large."""

import asyncio
import json
import urllib.request
from collections.abc import Sequence

import grpc
import pytest

from antiphon.cli.main import main
from antiphon.server.settings import SHIPPED_BUNDLE
from antiphon.tools.capacity.size_report import SCRAPE_BYTES, SCRAPE_SAMPLES
from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.integration.process import PATIENCE_S, ServerProcess
from tests.reliability.footprint import peak_bytes

pytestmark = pytest.mark.programs

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
        peak, limit = peak_bytes(server.process.pid), printed["memory_limit_bytes"]
        with urllib.request.urlopen(server.metrics_url, timeout=PATIENCE_S) as response:
            scrape = response.read()
    used_bytes = sum(term["bytes"] for term in printed["memory_terms"] if term["name"] not in OF_ABUSE)
    said = f"peak {peak / MIB:.0f} MiB of {limit / MIB:.0f}"
    assert peak <= limit, said
    assert used_bytes <= 2 * peak, said
    num_samples = sum(1 for line in scrape.splitlines() if not line.startswith(b"#"))
    assert num_samples == pytest.approx(SCRAPE_SAMPLES, rel=0.2)
    assert len(scrape) == pytest.approx(SCRAPE_BYTES, rel=0.2)


MIB = 1 << 20


async def fill(server: ServerProcess, *, rows: int, waiting: int, source_len: int, target_len: int) -> None:
    """Run all rows over their maximum length; let other requests wait, each with a connection; then score targets.

    Most of a target is its prefix, which is fed in one step, so that all rows run at the same time.
    """
    channels = [grpc.aio.insecure_channel(server.target, options=_OWN) for _ in range(rows + waiting)]
    prefix_len, num_new = target_len - target_len // 4, target_len // 4 - 1
    try:
        asked = [_ask(channel, source_len, prefix_len, num_new) for channel in channels[:rows]]
        await asyncio.to_thread(server.wait_for_metrics, lambda found: found[_FREE] == 0)
        asked += [_ask(channel, source_len // 4, prefix_len, num_new) for channel in channels[rows:]]
        await asyncio.to_thread(server.wait_for_metrics, lambda found: found[_WAITING] >= waiting // 2)
        for one in asked:
            one.cancel()
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert [end for end in ends if isinstance(end, grpc.aio.AioRpcError)] == []
        await asyncio.gather(*(_judge(channel, target_len) for channel in channels[:16]))
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


_OWN = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
_FREE = "antiphon_kv_cache_blocks{use=free}"
_WAITING = "antiphon_num_requests_waiting"


def _ids(first: int, count: int) -> Sequence[int]:
    return [5 + (first + index) % 1000 for index in range(count)]


def _ask(channel: grpc.aio.Channel, source_len: int, prefix_len: int, num_new: int) -> asyncio.Task[None]:
    """Start a stream that is read in the background. source_len includes the end token, which the server adds."""
    options = pb.GenerateOptions(
        max_new_tokens=num_new, ignore_eos=True, prefix_ids=pb.TokenIds(ids=_ids(1, prefix_len))
    )
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=_ids(7, source_len - 1)), options=options)

    async def read() -> None:
        async for _ in InferenceServiceStub(channel).Generate(request):
            pass

    return asyncio.create_task(read())


async def _judge(channel: grpc.aio.Channel, target_len: int) -> None:
    """Score a short source and a long target: the maximum of scored tokens in a step."""
    target = pb.TokenIds(ids=_ids(1, target_len - 2))
    await InferenceServiceStub(channel).Score(
        pb.ScoreRequest(token_ids=pb.TokenIds(ids=_ids(0, 4)), target_token_ids=target)
    )
