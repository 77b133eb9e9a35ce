"""Streams to one replica, and to two of which one is stopped, with the result of each call."""

from __future__ import annotations

import asyncio
import collections
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from antiphon.v1 import inference_pb2 as pb
from antiphon.v1.inference_pb2_grpc import InferenceServiceStub

PATIENCE_S = 120
SOURCES = tuple(
    f"{who} {what} {where}."
    for who, what, where in itertools.product(
        ("My sister", "The old man", "A friend of mine", "Nobody"),
        ("was waiting", "is reading a long book", "has lost the key", "wants to sleep"),
        ("in front of the house", "at the station", "because it is raining", "before the others come back"),
    )
)
"""64 sentences, all different."""

# gRPC itself answers CANCELLED to a call that reaches a server while it closes; no handler has started.
_REFUSALS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
# Without retries, so that every refusal is counted.
_OPTIONS = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1))


class Refused(Exception):
    """The call was refused before any answer, so it can be sent to another replica."""


@dataclass(slots=True)
class Tally:
    """Results of calls. answered: complete and correct, by replica. lost: neither answered nor refused, with reason."""

    answered: collections.Counter[str] = field(default_factory=collections.Counter)
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    lost: list[str] = field(default_factory=list)


async def answers_alone(target: str) -> dict[str, str]:
    """Return the server's answer to each source, requested one after the other."""
    async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
        return {source: await _answer(channel, source) for source in SOURCES}


async def answers_at_once(target: str, num_streams: int) -> list[tuple[str, str]]:
    """Return sources and answers of `num_streams` streams that are open at once."""
    async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
        sources = list(itertools.islice(itertools.cycle(SOURCES), num_streams))
        return list(zip(sources, await asyncio.gather(*(_answer(channel, source) for source in sources)), strict=True))


async def is_same_in_a_crowd(target: str, num_streams: int, alone: dict[str, str]) -> bool:
    """Return whether 5 groups of concurrent streams get the same answers as each source alone."""
    rounds = [await answers_at_once(target, num_streams) for _ in range(5)]
    return all(alone[source] == text for answers in rounds for source, text in answers)


async def while_one_leaves(
    targets: Sequence[str], num_streams: int, expected: dict[str, str], leave: Callable[[], Awaitable[object]]
) -> Tally:
    """Send requests to both replicas until `leave` returns, and one more each. It starts after an answer on each."""
    tally, has_left = Tally(), asyncio.Event()
    begin = asyncio.Barrier(num_streams + 1)
    channels = {target: grpc.aio.insecure_channel(target, options=_OPTIONS) for target in targets}

    async def ask_on(index: int) -> None:
        turns = itertools.cycle(channels if index % 2 else reversed(channels))
        await _ask(channels, turns, SOURCES[index % len(SOURCES)], expected, tally)
        await begin.wait()
        is_last = False
        while not is_last:
            is_last = has_left.is_set()
            await _ask(channels, turns, SOURCES[index % len(SOURCES)], expected, tally)

    async def direct() -> None:
        await begin.wait()
        await leave()
        has_left.set()

    await asyncio.wait_for(asyncio.gather(direct(), *map(ask_on, range(num_streams))), PATIENCE_S)
    await asyncio.gather(*(channel.close() for channel in channels.values()))
    return tally


async def _ask(
    channels: dict[str, grpc.aio.Channel],
    turns: itertools.cycle[str],
    source: str,
    expected: dict[str, str],
    tally: Tally,
) -> None:
    """Make one call; if a replica refuses it, send it to the next one."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        target = next(turns)
        try:
            text = await _answer(channels[target], source)
        except Refused as refusal:
            tally.refused[f"{target} {refusal}"] += 1
            continue
        except grpc.aio.AioRpcError as error:
            tally.lost.append(f"{target}: {error.code().name}: {error.details()}")
            return
        if text != expected[source]:
            tally.lost.append(f"{target}: {source!r} became {text!r} and not {expected[source]!r}")
        tally.answered[target] += 1
        return
    tally.lost.append(f"{source!r} was refused everywhere for {PATIENCE_S} s")


async def _answer(channel: grpc.aio.Channel, source: str) -> str:
    """Return the complete answer of one stream. Raises Refused, AioRpcError."""
    call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(text=source), timeout=PATIENCE_S)
    text, has_ended, has_begun = "", False, False
    try:
        async for message in call:
            has_begun = True
            text += message.text_delta
            has_ended |= message.finish_reason != pb.FINISH_REASON_UNSPECIFIED
    except grpc.aio.AioRpcError as error:
        if has_begun or error.code() not in _REFUSALS or error.initial_metadata():
            raise
        raise Refused(error.code().name) from error
    if not has_ended:
        raise AssertionError(f"the stream of {source!r} ended well, without a finish reason")
    return text
