"""A server with rows of maximum length, a full cache and a queue: its maximum memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import grpc

from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub
from tests.integration.process import ServerProcess

MIB = 1 << 20


def peak_bytes(server: ServerProcess) -> int:
    """Return the peak of resident memory."""
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


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
