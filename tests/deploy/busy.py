"""Load with all kinds of requests: answered, streamed, beams, samples, cancelled, expired, refused.

python -m tests.deploy.busy HOST:PORT SECONDS
"""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio

from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub

# Each length is twice the previous one, so that quadratic growth is visible, and has its own label source_len.
LENGTHS = (32, 64, 128, 256)
SENTENCE = "Where is the station?"  # shorter than those


async def alone(target: str, times: int = 2) -> None:
    """Send sources of each length one after the other, so that each encoder run has one source."""
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = InferenceServiceStub(channel)
        for length in LENGTHS * times:
            source = pb.TokenIds(ids=[10 + index % 90 for index in range(length - 1)])  # and the end token
            await stub.GenerateUnary(
                pb.GenerateUnaryRequest(token_ids=source, options=pb.GenerateOptions(max_new_tokens=2))
            )


async def round_of_all(target: str) -> None:
    """Send all kinds of calls at once; some of them must fail."""
    async with grpc.aio.insecure_channel(target, options=[("grpc.enable_retries", 0)]) as channel:
        await channel.channel_ready()  # or deadlines would pass before anything is sent
        stub: Any = InferenceServiceStub(channel)
        calls = [
            *(_read(stub.Generate(_stream(24))) for _ in range(12)),
            *(stub.GenerateUnary(_whole(16, **options)) for options in _WAYS),
            *(stub.GenerateUnary(_whole(16, temperature=-1)) for _ in range(2)),
            *(stub.GenerateUnary(_whole(250, ignore_eos=True), timeout=0.1) for _ in range(2)),
            *(_drop(stub.Generate(_stream(250, ignore_eos=True))) for _ in range(2)),
            stub.Score(pb.ScoreRequest(text=SENTENCE, target_text="Wo ist der Bahnhof?")),
            stub.Embed(pb.EmbedRequest(text=SENTENCE)),
        ]
        await asyncio.gather(*calls, return_exceptions=True)


@contextmanager
def busy(target: str) -> Iterator[None]:
    """Keep a server under load from another thread, until the context ends."""
    enough = threading.Event()

    async def load() -> None:
        await alone(target)
        while not enough.is_set():
            await round_of_all(target)

    thread = threading.Thread(target=lambda: asyncio.run(load()))
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


_WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"beam_width": 4, "num_return_sequences": 2},
    {"temperature": 0.9, "num_return_sequences": 2, "seed": 1},
    {"repetition_penalty": 1.3},
)


def _whole(max_new_tokens: int, **options: Any) -> pb.GenerateUnaryRequest:
    return pb.GenerateUnaryRequest(text=SENTENCE, options=pb.GenerateOptions(max_new_tokens=max_new_tokens, **options))


def _stream(max_new_tokens: int, **options: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=SENTENCE, options=pb.GenerateOptions(max_new_tokens=max_new_tokens, **options))


async def _read(stream: Any) -> None:
    async for _ in stream:
        pass


async def _drop(stream: Any) -> None:
    await stream.read()
    stream.cancel()


async def _crowd(target: str, rounds: int) -> None:
    await asyncio.gather(*(round_of_all(target) for _ in range(rounds)))


def main() -> None:
    target, seconds = sys.argv[1], float(sys.argv[2])
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        asyncio.run(alone(target, times=1))
        for crowd in (1, 1, 1, 12):
            asyncio.run(_crowd(target, crowd))


if __name__ == "__main__":
    main()
